"""The cache under whole mlx-lm models, its protocol, its memory, and what it refuses."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.base import create_causal_mask
from small import (
    KINDS,
    NO_QUERIES,
    Stream,
    a_policy,
    attend,
    feed,
    kept_positions,
    kept_scores,
    step,
    tiny_llama,
    tokens,
)

from keyformer import (
    H2O,
    POLICIES,
    BatchKeyformerKVCache,
    Full,
    Keyformer,
    KeyformerKVCache,
    Policy,
    Window,
    attached,
    make_prompt_cache,
)
from keyformer.layers import group_layers

EVICTING = [kind for kind in KINDS if kind != "full"]


@pytest.fixture
def model() -> Iterator[Any]:
    """A tiny random llama with its queries shown."""
    made = tiny_llama()
    with attached(made):
        yield made


def plain_logits(model: Any, prompt: mx.array, chunk: int, answer: list[int]) -> list[mx.array]:
    caches = mlx_cache.make_prompt_cache(model)
    out = [feed(model, caches, prompt, chunk)]
    return out + [step(model, caches, t) for t in answer]


# -- exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_budget_is_bit_identical_to_mlx_lms_own_cache(kind: str, dtype: mx.Dtype) -> None:
    model = tiny_llama(dtype)
    prompt, answer = tokens(33), tokens(5, seed=1).tolist()
    expected = plain_logits(model, prompt, 16, answer)
    for prefill in ("full", "chunked"):
        caches = make_prompt_cache(model, a_policy(kind, 1, 2), 39, prefill)
        with attached(model):
            got = [feed(model, caches, prompt, 16)] + [step(model, caches, t) for t in answer]
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == dtype
            assert mx.array_equal(a, b)
        for c in caches:
            assert c.keys.dtype == c.values.dtype == dtype
            assert c.size() == c.offset == 38
            assert c.scores.dtype == mx.float32


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("kind", EVICTING)
def test_eviction_keeps_the_models_dtype(kind: str, dtype: mx.Dtype) -> None:
    model = tiny_llama(dtype)
    caches = make_prompt_cache(model, a_policy(kind, 1, 2), 12)
    with attached(model):
        feed(model, caches, tokens(33), 16)
        logits = [step(model, caches, t) for t in range(5)]
    assert {x.dtype for x in logits} == {dtype}
    for c in caches:
        assert c.keys.dtype == c.values.dtype == c.state[0].dtype == c.state[1].dtype == dtype
        assert (c.scores.dtype, c.positions.dtype) == (mx.float32, mx.int32)
        assert c.size() == 12


def test_a_large_value_survives() -> None:
    """1e5 is infinite in float16; in float32 and bfloat16 it must come back as it was."""
    for dtype in (mx.float32, mx.bfloat16):
        cache = KeyformerKVCache(Window(n_sink=0), 4)
        rows = mx.full((1, 1, 6, 4), 1e5, dtype)
        attend(cache, rows, rows, rows, 0.1)
        cache.end_prefill()
        assert mx.array_equal(cache.state[0], rows[:, :, :4])


@pytest.mark.parametrize("kind", EVICTING)
def test_kept_sets_do_not_depend_on_the_chunk_size(model: Any, kind: str) -> None:
    prompt, answer = tokens(18, seed=4), [3, 7, 1]
    found = []
    for chunk in [18, *range(1, 18)]:
        caches = make_prompt_cache(model, a_policy(kind, 1, 2, seed=5), 8)
        feed(model, caches, prompt, chunk)
        after_prompt = [kept_positions(c) for c in caches]
        logits = [step(model, caches, t) for t in answer]
        found.append((after_prompt, [kept_positions(c) for c in caches], np.array(mx.stack(logits))))
    for after_prompt, after_answer, logits in found[1:]:
        assert after_prompt == found[0][0]
        assert after_answer == found[0][1]
        np.testing.assert_allclose(logits, found[0][2], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", EVICTING)
def test_nor_does_the_second_turn(model: Any, kind: str) -> None:
    found = []
    for chunk in (1, 2, 3, 5, 9):
        caches = make_prompt_cache(model, a_policy(kind, 1, 2, seed=5), 8)
        feed(model, caches, tokens(12, seed=4), 12)
        for t in (3, 7, 1):
            step(model, caches, t)
        feed(model, caches, tokens(9, seed=8), chunk)
        found.append([kept_positions(c) for c in caches])
        assert all(c.size() == 8 and c.offset == 24 for c in caches)
    assert all(f == found[0] for f in found)


@pytest.mark.parametrize("kind", EVICTING)
def test_the_same_prompt_twice_gives_the_same_tokens(model: Any, kind: str) -> None:
    runs = []
    for _ in range(2):
        caches = make_prompt_cache(model, a_policy(kind, 1, 2), 10)
        logits = [feed(model, caches, tokens(30), 16)] + [step(model, caches, t) for t in range(10)]
        runs.append((np.array(mx.stack(logits)), [kept_positions(c) for c in caches]))
    assert (runs[0][0] == runs[1][0]).all()
    assert runs[0][1] == runs[1][1]


@pytest.mark.parametrize("kind", EVICTING)
def test_eviction_changes_what_the_next_token_sees(model: Any, kind: str) -> None:
    """A small budget must show in the logits at once; a cache that only masks late, or not at all, would not."""
    full = make_prompt_cache(model, Full())
    evicted = make_prompt_cache(model, a_policy(kind, 1, 2), 6)
    first = [feed(model, caches, tokens(30), 30) for caches in (full, evicted)]
    assert mx.array_equal(*first)  # the prompt itself sees everything
    assert mx.abs(step(model, full, 5) - step(model, evicted, 5)).max().item() > 0.1


# -- against RotatingKVCache -------------------------------------------------------------------------------------------


def numbered(first: int, last: int) -> mx.array:
    """Rows whose every component is their position."""
    rows = mx.arange(first, last, dtype=mx.float32)[None, None, :, None]
    return mx.broadcast_to(rows, (1, 1, last - first, 4))


@pytest.mark.parametrize("n_sink", [0, 1, 4])
@pytest.mark.parametrize("prompt", [1, 5, 9])
def test_window_keeps_the_positions_of_rotating(n_sink: int, prompt: int) -> None:
    budget = 9
    ours = KeyformerKVCache(Window(n_sink=n_sink), budget)
    theirs = mlx_cache.RotatingKVCache(max_size=budget + 1, keep=n_sink)
    sizes = [prompt] + [1] * 40
    at = 0
    for S in sizes:
        rows = numbered(at, at + S)
        at += S
        seen = [sorted(c.update_and_fetch(rows, rows)[0][0, 0, :, 0].tolist()) for c in (ours, theirs)]
        assert seen[0] == seen[1]
    assert len(seen[0]) == budget + 1


@pytest.mark.parametrize("prompt", [1, 9])
@pytest.mark.parametrize("n_sink", [0, 4])
def test_window_gives_the_logits_of_rotating(model: Any, n_sink: int, prompt: int) -> None:
    """Fed one token at a time, and with a prompt that fits."""
    budget = 9
    ours = make_prompt_cache(model, Window(n_sink=n_sink), budget)
    theirs = [mlx_cache.RotatingKVCache(max_size=budget + 1, keep=n_sink) for _ in ours]
    first = tokens(prompt)
    a, b = (model(first[None], cache=c)[:, -1] for c in (ours, theirs))
    np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5, rtol=0)
    for t in tokens(30, seed=2).tolist():
        np.testing.assert_allclose(np.array(step(model, ours, t)), np.array(step(model, theirs, t)), atol=1e-5, rtol=0)


# -- batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_are_the_single_sequences(model: Any, kind: str) -> None:
    """Lengths below, at and above different budgets; one leaves half-way and the order changes."""
    lengths, budgets = [5, 30, 12, 17], [8, 8, 40, 17]
    policy = a_policy(kind, 1, 2, seed=3)
    singles = [make_prompt_cache(model, policy, b) for b in budgets]
    for i, caches in enumerate(singles):
        feed(model, caches, tokens(lengths[i], seed=i), 10)
    merged = [layer[0].merge(list(layer)) for layer in zip(*copy.deepcopy(singles), strict=True)]
    live = [0, 1, 2, 3]
    for n, t in enumerate(tokens(16, seed=9).tolist()):
        if n == 8:
            live = [3, 0, 2]
            for c in merged:
                c.filter(live)
        together = step(model, merged, *[t + i for i in live])
        for row, i in enumerate(live):
            alone = step(model, singles[i], t + i)
            np.testing.assert_allclose(np.array(together[row]), np.array(alone[0]), atol=1e-5, rtol=0)
            for layer, c in enumerate(merged):
                assert kept_positions(c, row) == kept_positions(singles[i][layer])
                assert c.sizes()[row] == singles[i][layer].size()
                assert c.slots()[row] == singles[i][layer].slots()[0]
        assert np.array(merged[0].offset).tolist() == [singles[i][0].offset for i in live]
        assert merged[0].size() == max(singles[i][0].size() for i in live)


def test_a_batch_that_is_full_needs_no_mask() -> None:
    stream = Stream.random(0, 20, 2, 1, 4, 4)
    caches = [KeyformerKVCache(Window(n_sink=0), 5) for _ in range(2)]
    for n, c in zip((4, 12), caches, strict=True):
        attend(c, *stream.part(0, n), 1.0)
        c.end_prefill()
    batch = KeyformerKVCache.merge(caches)
    one = [mx.concatenate([a, a]) for a in stream.part(12, 13)]
    assert batch.make_mask(1).tolist() == [[[[True] * 5 + [False]]], [[[True] * 6]]]
    attend(batch, *one, 1.0)
    assert batch.make_mask(1) is None
    attend(batch, *one, 1.0)
    assert batch.make_mask(1) is None
    assert batch.slots() == [6, 6]


def test_what_a_batch_refuses() -> None:
    stream = Stream.random(0, 9, 2, 1, 4, 4)

    def ended(policy: Policy, layer: int = 0) -> KeyformerKVCache:
        c = KeyformerKVCache(policy, 9, layer)
        attend(c, *stream.part(0, 4), 1.0)
        c.end_prefill()
        return c

    with pytest.raises(ValueError, match=r"merge: expected caches with one policy, got .*n_sink=1"):
        KeyformerKVCache.merge([ended(Window()), ended(Window(n_sink=1))])
    with pytest.raises(ValueError, match="merge: expected caches with one layer"):
        KeyformerKVCache.merge([ended(Window()), ended(Window(), layer=1)])
    batch = KeyformerKVCache.merge([ended(Window()), ended(Window())])
    assert isinstance(batch, BatchKeyformerKVCache)
    for caches in ([], [batch]):
        with pytest.raises(ValueError, match=r"merge: .* each a KeyformerKVCache, got (none|Batch.*); extend joins"):
            KeyformerKVCache.merge(caches)
    with pytest.raises(ValueError, match="extend: expected layer 0, got 1"):
        batch.extend(KeyformerKVCache.merge([ended(Window(), layer=1)]))
    two = [mx.concatenate([a, a]) for a in stream.part(4, 6)]
    with pytest.raises(ValueError, match="expected a batch of 2, got 1"):
        batch.update_and_fetch(*stream.part(4, 5)[1:])
    with pytest.raises(ValueError, match="lengths: expected 2 numbers of at least 0"):
        batch.prepare(lengths=[1])
    with pytest.raises(ValueError, match="right_padding: expected lengths beside it"):
        batch.prepare(right_padding=[0, 2])
    assert not batch.is_trimmable()
    assert batch.trim(1) == 0
    with pytest.raises(ValueError, match=r"expected a batch of 1, got 2; use KeyformerKVCache\.merge"):
        KeyformerKVCache(Window(), 9).update_and_fetch(*two[1:])


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def exact_memory() -> Iterator[None]:
    """No re-use of freed buffers, which may be larger than what they come to hold."""
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


@pytest.mark.usefixtures("exact_memory")
def test_a_prompt_that_has_ended_holds_only_the_rows_it_kept() -> None:
    """Whoever waits after the prompt (a server, a store of prompts) holds the budget, not the last chunk."""
    gc.collect()
    empty = mx.get_active_memory()
    keys, values = (mx.random.normal((1, 1, 4096, 64), key=mx.random.key(i)) for i in range(2))
    cache = KeyformerKVCache(a_policy("window", 1, 2), 16)
    cache.begin_prefill()
    mx.eval(cache.update_and_fetch(keys, values))
    cache.end_prefill()
    mx.eval(cache.state)
    del keys, values
    gc.collect()
    mx.synchronize()
    assert mx.get_active_memory() - empty < 64 * 1024  # a chunk of keys is 1 MiB


@pytest.mark.usefixtures("exact_memory")
@pytest.mark.parametrize("budget", [63, 2000])  # 64 rows and 512: whole pages, which a GPU's allocator rounds up to
@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_with_decoded_tokens(kind: str, budget: int) -> None:
    """Only logits are evaluated, as mlx-lm does. A lazy graph would hold every step's arrays: hundreds of KB here."""
    model = tiny_llama(num_hidden_layers=1, num_attention_heads=2, head_dim=64, hidden_size=32, intermediate_size=32)
    mx.eval(model.parameters())
    gc.collect()
    empty = mx.get_active_memory()
    caches = make_prompt_cache(model, a_policy(kind, 1, 2), budget)
    measured = {}
    with attached(model):
        logits = model(tokens(110)[None], cache=caches)
        mx.eval(logits)
        for n in range(1, 401):
            logits = step(model, caches, n % 300)
            if n in (200, 300, 400):
                del logits
                mx.synchronize()  # a GPU holds a step's temporaries until it has finished
                measured[n] = mx.get_active_memory() - empty
    allocated = caches[0].nbytes
    policy = caches[0].policy
    known = 8 + 4 * policy.window if policy.evicts else 0  # score, position, masses
    per_row = 2 * (2 * 64 * 4 + known)  # 2 heads: keys and values besides
    assert allocated == caches[0].keys.shape[2] * per_row + 2 * 4 * policy.evicts  # and each head's next slot
    if budget == 63 and kind != "full":
        assert measured[400] - measured[200] < 1024
        assert caches[0].keys.shape[2] == 64
    else:
        assert measured[400] - measured[300] < 1024  # 410 to 510 rows: within one step of 256
        assert caches[0].keys.shape[2] == 512
    assert measured[400] == pytest.approx(allocated, rel=0.05)


def test_allocation_grows_by_256_and_stops_at_budget_plus_1() -> None:
    stream = Stream.random(0, 700, 1, 1, 4, 4)
    cache = KeyformerKVCache(Window(), 400)
    assert cache.nbytes == 0
    assert cache.empty()

    def capacity(first: int, last: int) -> int:
        attend(cache, *stream.part(first, last), 1.0)
        assert cache.keys is not None
        assert not cache.empty()
        assert cache.nbytes >= cache.keys.nbytes + cache.values.nbytes + cache.scores.nbytes + cache.positions.nbytes
        return cache.keys.shape[2]

    assert capacity(0, 10) == 256
    assert capacity(10, 256) == 256
    assert {capacity(at, at + 1) for at in range(256, 430)} == {401}  # decoding: 512 would be more than it can use
    other = KeyformerKVCache(Window(), 400)
    attend(other, *stream.part(0, 600), 1.0)
    assert other.keys is not None
    assert other.keys.shape[2] == 768
    other.end_prefill()
    assert other.keys.shape[2] == 400
    attend(other, *stream.part(600, 601), 1.0)
    attend(other, *stream.part(601, 602), 1.0)
    assert other.keys.shape[2] == 401
    small = KeyformerKVCache(Window(), 300)
    for at in range(310):
        attend(small, *stream.part(at, at + 1), 1.0)
        assert small.keys is not None
        assert small.keys.shape[2] == (256 if at < 256 else 301)


def test_chunked_prefill_never_holds_more_than_budget_and_chunk() -> None:
    stream = Stream.random(0, 400, 2, 1, 4, 4)
    cache = KeyformerKVCache(H2O(), 30, prefill="chunked")
    for at in range(0, 400, 40):
        attend(cache, *stream.part(at, at + 40), 1.0)
        assert cache.size() == 30
        assert cache.keys is not None
        assert cache.keys.shape[2] == 30


# -- state -------------------------------------------------------------------------------------------------------------


def through_from_state(caches: list[Any], path: Path) -> list[Any]:
    return [type(c).from_state(c.state) for c in caches]


def through_deepcopy(caches: list[Any], path: Path) -> list[Any]:
    return copy.deepcopy(caches)


def through_a_file(caches: list[Any], path: Path) -> list[Any]:
    mlx_cache.save_prompt_cache(str(path / "cache.safetensors"), caches, {"who": "us"})
    loaded, metadata = mlx_cache.load_prompt_cache(str(path / "cache.safetensors"), return_metadata=True)
    assert metadata == {"who": "us"}
    return loaded


@pytest.mark.parametrize("way", [through_from_state, through_deepcopy, through_a_file])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_cache_goes_on_with_the_same_tokens(
    model: Any, kind: str, way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a prompt, after it, decoding below and above the budget, and before a second turn."""
    monkeypatch.setattr(mlx_cache, "KeyformerKVCache", KeyformerKVCache, raising=False)  # mlx-lm looks names up there
    policy = a_policy(kind, 1, 2, seed=2**63)
    caches = make_prompt_cache(model, policy, 14)
    for c in caches:
        c.begin_prefill()
    prompt = tokens(12)

    def restored() -> list[Any]:
        got = way(caches, tmp_path)
        for a, b in zip(got, caches, strict=True):
            assert a is not b
            assert a.policy == policy
            assert (a.budget, a.layer, a.prefill, a.offset, a.size()) == (
                b.budget,
                b.layer,
                b.prefill,
                b.offset,
                b.size(),
            )
            assert kept_positions(a) == kept_positions(b)
            assert kept_scores(a) == kept_scores(b)
        return got

    reference = make_prompt_cache(model, policy, 14)  # never restored
    feed(model, reference, prompt, 12)
    model(prompt[None, :7], cache=caches)
    caches = restored()  # one-token chunks still belong to the prompt
    for at in range(7, 12):
        model(prompt[None, at : at + 1], cache=caches)
    for c in caches:
        c.end_prefill()
    for n in range(8):
        other = restored()
        expected, *logits = (step(model, c, n + 20) for c in (reference, caches, other))
        for both, got in zip((caches, other), logits, strict=True):
            np.testing.assert_allclose(np.array(got), np.array(expected), atol=1e-5, rtol=0)
            for c, r in zip(both, reference, strict=True):
                assert kept_positions(c) == kept_positions(r)
                np.testing.assert_allclose(kept_scores(c), kept_scores(r), atol=3e-5)
        if n % 2:
            caches = other
    other = restored()
    for c in (caches, other):
        feed(model, c, tokens(6, seed=6), 4)
    assert [kept_positions(c) for c in caches] == [kept_positions(c) for c in other]
    assert all(c.size() == 14 or kind == "full" for c in caches)


def test_the_state_of_an_empty_cache() -> None:
    cache = KeyformerKVCache(Keyformer(seed=7), 20, layer=3)
    again = KeyformerKVCache.from_state(cache.state)
    assert again.empty()
    assert (again.policy, again.budget, again.layer, again.offset) == (Keyformer(seed=7), 20, 3, 0)


def test_state_is_in_temporal_order_without_the_freed_row() -> None:
    stream = Stream.random(0, 40, 2, 1, 4, 4)
    cache = KeyformerKVCache(H2O(), 6)
    attend(cache, *stream.part(0, 10), 1.0)
    cache.end_prefill()
    for at in range(10, 40):
        attend(cache, *stream.part(at, at + 1), 1.0)
    keys, values, scores, positions, *_ = cache.state
    order = positions[0, 0].tolist()
    assert len(order) == 6
    assert order == sorted(order)
    assert order[-3:] == [37, 38, 39]
    assert mx.array_equal(keys[0, 0], stream.k[0, 0, mx.array(order)])
    assert mx.array_equal(values[0, 0], stream.v[0, 0, mx.array(order)])
    assert scores.shape == positions.shape


# -- trimming, copies of a prompt --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_trim_and_is_trimmable_agree(model: Any, kind: str) -> None:
    caches = make_prompt_cache(model, a_policy(kind, 1, 2), 9)
    prompt = tokens(20)
    # what will evict cannot be taken back by speculative decoding, which asks an empty cache
    assert mlx_cache.can_trim_prompt_cache(caches) is (kind == "full")
    model(prompt[None], cache=caches)
    scored = caches[0].policy.attention == "query"
    assert caches[0].is_trimmable() is not scored
    trimmed = mlx_cache.trim_prompt_cache(caches, 5)
    assert trimmed == (0 if scored else 5)
    assert [(c.offset, c.size()) for c in caches] == [(20 - trimmed,) * 2] * 2
    again = [c.trim(3) for c in caches]
    assert again == [0 if scored else 3] * 2
    if not scored:
        model(prompt[None, 12:], cache=caches)
    other = make_prompt_cache(model, a_policy(kind, 1, 2), 9)
    model(prompt[None], cache=other)
    for c in (*caches, *other):
        c.end_prefill()
    assert [kept_positions(c) for c in caches] == [kept_positions(c) for c in other]
    a, b = (step(model, c, 4) for c in (caches, other))
    np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5, rtol=0)
    if kind != "full":  # evicted
        assert not any(c.is_trimmable() for c in caches)
        assert [c.trim(2) for c in caches] == [0, 0]
        assert [(c.offset, c.size()) for c in caches] == [(21, 9)] * 2


@pytest.mark.parametrize("kind", ["window", "knorm"])
@pytest.mark.parametrize("most", [1, 2])
def test_decoded_tokens_below_the_budget_are_trimmed(model: Any, kind: str, most: int) -> None:
    """Their scores and positions are a group's while decoding, the cache's own again behind the cut."""
    caches = make_prompt_cache(model, a_policy(kind), 30)
    group_layers(caches, most)
    feed(model, caches, tokens(8), 8)
    decoded = [step(model, caches, t) for t in (5, 6, 7)]
    assert [c.trim(2) for c in caches] == [2, 2]
    assert [c.kept().tolist() for c in caches] == [[list(range(9))] * 2] * 2
    assert all(c.scores is not None and c.ranks().shape == (2, 9) for c in caches)
    assert [mx.array_equal(step(model, caches, t), a) for t, a in zip((6, 7), decoded[1:], strict=True)] == [True] * 2
    assert caches[0].trim(1) == 1 and caches[1].trim(1) == 1
    feed(model, caches, tokens(25), 25)  # more prompt evicts
    assert [c.kept().shape for c in caches] == [(2, 30)] * 2


def test_trim_more_than_there_is() -> None:
    cache = KeyformerKVCache(Window(), 9)
    rows = numbered(0, 5)
    cache.update_and_fetch(rows, rows)
    assert cache.trim(8) == 5
    assert (cache.offset, cache.size()) == (0, 0)
    fetched, _ = cache.update_and_fetch(numbered(0, 3), numbered(0, 3))
    assert fetched[0, 0, :, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("budget", [8, 50])
@pytest.mark.parametrize("kind", KINDS)
def test_set_prompt_equals_feeding(kind: str, budget: int) -> None:
    stream = Stream.random(1, 40, 4, 2, 8, 5)
    policy = a_policy(kind, 1, 2)
    fed = KeyformerKVCache(policy, budget, 2)
    fed.begin_prefill()
    for at in (0, 9, 10, 25):
        attend(fed, *stream.part(at, {0: 9, 9: 10, 10: 25, 25: 30}[at]), stream.scale)
    given = KeyformerKVCache(policy, budget, 2)
    if kind in NO_QUERIES:
        given.set_prompt(*stream.part(0, 30)[1:])
    else:
        masses = None if fed.masses is None else fed.masses[:, :, :30]
        given.set_prompt(*stream.part(0, 30)[1:], fed.scores[..., :30], masses)
    for c in (fed, given):
        c.end_prefill()
    assert kept_positions(fed) == kept_positions(given)
    for at in range(30, 40):
        a, b = (attend(c, *stream.part(at, at + 1), stream.scale) for c in (fed, given))
        assert mx.array_equal(a, b)
        assert kept_positions(fed) == kept_positions(given)
        assert kept_scores(fed) == kept_scores(given)
    for used in (fed, KeyformerKVCache(policy, budget, prefill="chunked")):
        with pytest.raises(ValueError, match="set_prompt: expected an empty cache with prefill 'full'"):
            used.set_prompt(*stream.part(0, 30)[1:])


# -- NaN and infinite keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("prefill", ["full", "chunked"])
@pytest.mark.parametrize("kind", EVICTING)
def test_a_bad_key_goes_first_and_never_costs_a_sink(kind: str, prefill: str, value: float) -> None:
    stream = Stream.random(2, 40, 4, 2, 8, 8)
    stream.k[0, 0, 6, 3] = value
    cache = KeyformerKVCache(a_policy(kind, 3, 2), 11, prefill=prefill)
    for first, last in ((0, 4), (4, 12)):
        attend(cache, *stream.part(first, last), stream.scale)
    cache.end_prefill()
    a, b = kept_positions(cache)
    assert a == [p for p in range(12) if p != 6]  # one had to go
    assert len(b) == 11
    stream.k[0, 1, 20, 0] = value  # and one that arrives while decoding goes when it leaves the recent rows
    for at in range(12, 40):
        attend(cache, *stream.part(at, at + 1), stream.scale)
        a, b = kept_positions(cache)
        assert a[:3] == b[:3] == [0, 1, 2]
        assert a[-2:] == b[-2:] == [at - 1, at]
        assert (20 in b) == (at in (20, 21))
        assert all(math.isfinite(s) for s in kept_scores(cache)[0])


@pytest.mark.parametrize("kind", EVICTING)
def test_a_sink_whose_own_key_is_bad_stays(kind: str) -> None:
    stream = Stream.random(2, 30, 4, 2, 8, 8)
    stream.k[0, :, 1] = math.nan
    cache = KeyformerKVCache(a_policy(kind, 3, 2), 9)
    attend(cache, *stream.part(0, 20), stream.scale)
    cache.end_prefill()
    for at in range(20, 30):
        attend(cache, *stream.part(at, at + 1), stream.scale)
    assert all(head[:3] == [0, 1, 2] and head[-2:] == [28, 29] for head in kept_positions(cache))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_queries_that_were_never_shown_are_an_error(kind: str) -> None:
    """On a model that is not attached; policies that need no queries work."""
    model = tiny_llama()
    caches = make_prompt_cache(model, a_policy(kind, 1, 2), 9)
    model(tokens(12)[None], cache=caches)
    if kind in NO_QUERIES:
        step(model, caches, 1)
        assert caches[0].offset == 13
        return
    with pytest.raises(
        RuntimeError, match=r"queries, which no one reported.*keyformer\.attached.*keyformer_proxy, .*window"
    ):
        step(model, caches, 1)


def test_masks() -> None:
    cache = KeyformerKVCache(Window(n_sink=0), 4)
    assert cache.make_mask(1) is None
    assert cache.make_mask(3) == "causal"
    for window in (0, 5):
        with pytest.raises(
            ValueError, match=f"global attention only, got a sliding window of {window}; keep mlx-lm's Rot"
        ):
            cache.make_mask(3, window_size=window)
    rows = numbered(0, 8)
    attend(cache, rows, rows, rows, 1.0)
    assert mx.array_equal(cache.make_mask(2, return_array=True), create_causal_mask(2, 8))
    cache.end_prefill()
    attend(cache, *[numbered(8, 9)] * 3, 1.0)
    # four rows are stored, whatever the number of tokens seen and of slots in use
    assert mx.array_equal(cache.make_mask(2, return_array=True), create_causal_mask(2, 4))
    assert (cache.offset, cache.size(), cache.slots()) == (9, 4, [5])


@pytest.mark.parametrize("kind", EVICTING)
def test_a_mask_as_an_array_scores_as_causal_does(kind: str) -> None:
    """mlx-lm's own [S, n] mask, with a prompt of two chunks."""
    stream = Stream.random(4, 24, 4, 2, 8, 8)
    caches = [KeyformerKVCache(a_policy(kind, 1, 2), 8) for _ in range(2)]
    for first, last in ((0, 15), (15, 24)):
        q, k, v = stream.part(first, last)
        outputs = []
        for c, as_array in zip(caches, (False, True), strict=True):
            mask = c.make_mask(last - first, return_array=as_array)
            keys, values = c.update_and_fetch(k, v)
            outputs.append(mx.fast.scaled_dot_product_attention(q, keys, values, scale=stream.scale, mask=mask))
            c.observe(q, keys, scale=stream.scale, mask=mask)
        np.testing.assert_allclose(*map(np.array, outputs), atol=1e-5)
    for c in caches:
        c.end_prefill()
    assert kept_positions(caches[0]) == kept_positions(caches[1])
    np.testing.assert_allclose(kept_scores(caches[0]), kept_scores(caches[1]), atol=1e-5)


def test_it_cannot_be_quantized(model: Any) -> None:
    """mlx-lm quantizes every cache with a `to_quantized` when kv_bits is set."""
    with pytest.raises(ValueError, match="keeps the model's dtype and cannot be quantized; leave kv_bits unset"):
        KeyformerKVCache(Window(), 9).to_quantized(group_size=64, bits=8)
    caches = make_prompt_cache(model, Window(), 9)
    with pytest.raises(ValueError, match="kv_bits"):
        next(generate_step(tokens(20), model, prompt_cache=caches, kv_bits=8, quantized_kv_start=0))


def test_a_call_of_no_tokens_changes_nothing() -> None:
    cache = KeyformerKVCache(H2O(), 9)
    none = numbered(0, 0)
    assert cache.update_and_fetch(none, none)[0].shape == (1, 1, 0, 4)
    rows = numbered(0, 5)
    attend(cache, rows, rows, rows, 1.0)
    assert cache.update_and_fetch(none, none)[0].shape == (1, 1, 5, 4)
    attend(cache, *[numbered(5, 6)] * 3, 1.0)
    assert (cache.offset, cache.size()) == (6, 6)


# -- mlx-lm's own loop -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tiny_model_folder: Path) -> tuple[Any, Any]:
    model, tokenizer = mlx_lm.load(str(tiny_model_folder))[:2]
    return model, tokenizer


PROMPT = "The capital of France is Paris and Alice lives in the city of Rome. Question: where does Alice live?"


@pytest.mark.parametrize("prefill_step_size", [5, 2048])
@pytest.mark.parametrize("prefill", ["full", "chunked"])
@pytest.mark.parametrize("kind", KINDS)
def test_stream_generate(loaded: tuple[Any, Any], kind: str, prefill: str, prefill_step_size: int) -> None:
    model, tokenizer = loaded

    def run(caches: Any) -> list[int]:
        responses = mlx_lm.stream_generate(
            model, tokenizer, PROMPT, max_tokens=24, prompt_cache=caches, prefill_step_size=prefill_step_size
        )
        return [r.token for r in responses]

    plain = run(mlx_cache.make_prompt_cache(model))
    assert len(set(plain)) > 4
    with attached(model):
        large = make_prompt_cache(model, a_policy(kind, 1, 2), 500, prefill)
        assert run(large) == plain
        small = make_prompt_cache(model, a_policy(kind, 1, 2), 12, prefill)
        answer = run(small)
    if kind != "full":
        assert answer != plain
        assert [c.size() for c in small] == [12] * len(small)
        assert all(c.keys.shape[2] == 13 for c in small)


# -- what a breaker found ----------------------------------------------------------------------------------------------


def test_a_bad_key_stays_ranked_last_when_scores_fade_to_nothing() -> None:
    """0.5 ** 200 is 0 in float32, and -inf times 0 is no number."""
    stream = Stream.random(0, 420, 2, 1, 4, 4)
    stream.k[0, 0, 3, 0] = math.nan
    cache = KeyformerKVCache(H2O(decay=0.5, recent=0), 50)
    for first, last in ((0, 20), (20, 220), (220, 420)):
        attend(cache, *stream.part(first, last), stream.scale)
    assert cache.scores is not None
    scores = np.array(cache.scores[0, 0, :420])
    assert scores[3] == -math.inf
    assert np.isfinite(np.delete(scores, 3)).all()


def test_logits_that_leave_float32_spoil_no_score() -> None:
    stream = Stream.random(1, 30, 2, 1, 4, 4)
    stream.k[0, 0, 5] = 3e38
    cache = KeyformerKVCache(H2O(), 12)
    attend(cache, *stream.part(0, 20), stream.scale)
    stream.q[0, :, 20] = 1e10
    attend(cache, *stream.part(20, 21), stream.scale)
    for at in range(21, 30):
        attend(cache, *stream.part(at, at + 1), stream.scale)
    assert np.isfinite(kept_scores(cache)).all()
    assert cache.size() == 12


@pytest.mark.parametrize("through", ["state", "file"])
def test_a_state_of_another_version_or_policy_is_refused_by_name(through: str, tmp_path: Path) -> None:
    class Mine(H2O):
        def recent_rows(self, budget: int) -> int:
            return 6

    stream = Stream.random(2, 9, 2, 1, 4, 4)
    for policy, message in ((H2O(), "expected version 2, got 1"), (Mine(), "expected a policy of keyformer.POLICIES")):
        cache = KeyformerKVCache(policy, 8)
        attend(cache, *stream.part(0, 9), stream.scale)
        *arrays, text = cache.state
        state = (*arrays, text.replace('"version": 2', '"version": 1') if policy == H2O() else text)
        if through == "file":
            mlx_cache.save_prompt_cache(str(tmp_path / "c.safetensors"), [SavedAs(state)])
        with pytest.raises(ValueError, match=message):
            if through == "file":
                mlx_cache.load_prompt_cache(str(tmp_path / "c.safetensors"))
            else:
                KeyformerKVCache.from_state(state)


def SavedAs(state: object) -> object:
    """Something that mlx-lm saves under our class's name."""
    return type("KeyformerKVCache", (), {"state": state})()


def test_set_prompt_refuses_what_does_not_fit() -> None:
    stream = Stream.random(3, 9, 2, 2, 4, 4)
    scores = mx.ones((1, 2, 9))
    for policy, k, given, message in (
        (H2O(), mx.concatenate([stream.k, stream.k]), {}, "expected a batch of 1, got 2"),
        (H2O(), stream.k, {"scores": scores[..., :5]}, r"expected scores \(1, 2, 9\)"),
        (H2O(window=3, recent=0), stream.k, {"scores": scores}, "masses go with scores"),
        (H2O(), stream.k, {"scores": scores, "masses": scores[..., None]}, "masses go with scores"),
    ):
        with pytest.raises(ValueError, match=message):
            KeyformerKVCache(policy, 8).set_prompt(k, stream.v, **given)


def test_a_batch_without_sequences() -> None:
    batch = KeyformerKVCache.merge([KeyformerKVCache(Window(), 4)])
    batch.filter([])
    assert batch.size() == 0
    assert batch.nbytes == 0


@pytest.mark.parametrize("name, window", [("tova", 1), ("snapkv", 32)])
def test_of_a_prompt_whose_last_queries_count_only_those_are_scored(
    name: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk after chunk, the queries before are dropped unscored; a last chunk shorter than the window is added."""
    from keyformer import cache as module

    calls = []
    original = module.add_query_mass

    def look(*arguments: Any) -> Any:
        calls.append(arguments[9].queries.shape[2])
        return original(*arguments)

    monkeypatch.setattr(module, "add_query_mass", look)
    policy = POLICIES[name]()
    assert policy.window == window
    stream = Stream.random(3, 300, 4, 2, 8, 8)
    whole = KeyformerKVCache(policy, 100)
    for cache, chunks in ((whole, (300,)), (KeyformerKVCache(policy, 100), (90, 110, 80, 20))):
        cache.begin_prefill()
        at = 0
        for chunk in chunks:
            attend(cache, *stream.part(at, at + chunk), stream.scale)
            at += chunk
            mx.eval(cache.state[:-1])  # as mlx-lm does after every chunk
        assert not calls or window > chunks[-1]  # nothing yet
        if cache is not whole:
            cache = KeyformerKVCache.from_state(cache.state)
        cache.end_prefill()
        assert calls == ([window] if chunks == (300,) or window <= 20 else [32, 20])
        calls.clear()
        assert kept_positions(cache) == kept_positions(whole)
        np.testing.assert_allclose(kept_scores(cache), kept_scores(whole), atol=1e-6)
