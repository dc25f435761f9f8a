"""The faults a user of the peer library meets, D1 to D23, each as a test of what is right, end to end.

The numbers are those of the list of its defects; the sizes in its descriptions are kept where they are small enough.
"""

from __future__ import annotations

import copy
import gc
import math
import tomllib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm import batch_generate, stream_generate
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models import gemma3_text
from mlx_lm.models.cache import KVCache, LRUPromptCache, RotatingKVCache, load_prompt_cache, save_prompt_cache
from small import Stream, attend, feed, randomize, step, tiny_llama

import keyformer
from keyformer import (
    H2O,
    POLICIES,
    Full,
    Keyformer,
    KeyformerKVCache,
    KeyformerProxy,
    Policy,
    Window,
    attached,
    init_keyformer_state,
    keyformer_update_batched,
    make_policy,
    make_prompt_cache,
)

EVICTING = [name for name in POLICIES if POLICIES[name].evicts]
PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Any:
    return mlx_lm.utils.load_tokenizer(tiny_model_folder)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def a_prompt(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([n, seed]).integers(3, 300, n).tolist()


def budget_of(policy: Policy, rows: int = 32) -> int:
    return max(rows, policy.least_budget() + 2)


def kept(cache: Any) -> list[list[int]]:
    """Per KV head the positions of the stored rows, in temporal order, as they would be saved."""
    return [] if cache.empty() else cache.state[3][0].tolist()


def answer(model: Any, tokenizer: Any, prompt: list[int], tokens: int, **options: Any) -> list[int]:
    return [r.token for r in stream_generate(model, tokenizer, prompt, max_tokens=tokens, **options)]


def close(a: mx.array, b: mx.array) -> None:
    np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", EVICTING)
def test_d01_batch_generate_evicts(model: Any, tokenizer: Any, name: str) -> None:
    policy = make_policy(name)
    budget = budget_of(policy)
    prompts = [a_prompt(n) for n in (156, 96, 206)]
    plain = batch_generate(model, tokenizer, prompts, max_tokens=12, return_prompt_caches=True)
    assert [c[0].size() for c in plain.caches] != [budget] * 3
    with attached(model, policy, budget):
        ours = batch_generate(
            model, tokenizer, prompts, max_tokens=12, return_prompt_caches=True, return_token_ids=True
        )
        one_by_one = [answer(model, tokenizer, p, 12) for p in prompts]
    for caches in ours.caches:
        for c in caches:
            assert type(c) is KeyformerKVCache
            assert c.size() == c.state[0].shape[2] == budget
            assert all(len(set(head)) == budget for head in kept(c))
    assert ours.token_ids == [[t for t in a if t not in tokenizer.eos_token_ids] for a in one_by_one]
    assert all(a != b for a, b in zip(ours.texts, plain.texts, strict=True))


@pytest.mark.parametrize("name", EVICTING)
def test_d02_batch_generate_takes_evicted_caches(model: Any, tokenizer: Any, name: str) -> None:
    policy = make_policy(name)
    budget = budget_of(policy)
    with attached(model, policy, budget):
        histories = [mlx_cache.make_prompt_cache(model) for _ in range(2)]
        for caches, n in zip(histories, (145, 60), strict=True):
            answer(model, tokenizer, a_prompt(n), 3, prompt_cache=caches)
            assert all(c.size() == budget for c in caches)
        more = [a_prompt(9, 1), a_prompt(21, 1)]
        options: dict[str, Any] = {"max_tokens": 8, "return_prompt_caches": True, "return_token_ids": True}
        ours = batch_generate(model, tokenizer, more, prompt_caches=histories, **options)
        for i, caches in enumerate(histories):
            expected = answer(model, tokenizer, more[i], 8, prompt_cache=caches)
            assert ours.token_ids[i] == [t for t in expected if t not in tokenizer.eos_token_ids]
            assert [kept(c) for c in ours.caches[i]] == [kept(c) for c in caches]


def evicted(model: Any, policy: Policy, budget: int, prompt: int = 309) -> list[Any]:
    """Caches after a prompt and three tokens, inside attached."""
    caches = make_prompt_cache(model, policy, budget)
    feed(model, caches, mx.array(a_prompt(prompt)), 128)
    for t in (4, 5, 6):
        step(model, caches, t)
    return caches


@pytest.mark.parametrize("name", EVICTING)
def test_d03_saved_prompt_caches_load(model: Any, name: str, tmp_path: Path) -> None:
    policy = make_policy(name)
    path = str(tmp_path / "prompt.safetensors")
    with attached(model):
        caches = evicted(model, policy, budget_of(policy))
        save_prompt_cache(path, caches)
        loaded = load_prompt_cache(path)
        rebuilt = [KeyformerKVCache.from_state(c.state) for c in caches]
        expected = step(model, caches, 7)
        for others in (loaded, rebuilt):
            assert all(type(c) is KeyformerKVCache for c in others)
            close(step(model, others, 7), expected)
            assert [kept(c) for c in others] == [kept(c) for c in caches]


@pytest.mark.parametrize("name", EVICTING)
def test_d04_setting_the_state_loses_nothing(model: Any, name: str) -> None:
    policy = make_policy(name)
    budget = budget_of(policy, 64)
    with attached(model):
        caches = evicted(model, policy, budget)
        others = make_prompt_cache(model, policy, budget)
        for c, o in zip(caches, others, strict=True):
            o.state = c.state
            assert (o.offset, o.size()) == (c.offset, c.size()) == (312, budget)
        # one token: it attends to the rows kept and to itself
        k = mx.random.normal((1, 2, 1, 16), key=mx.random.key(0))
        fetched = [o.update_and_fetch(k, k)[0] for o in (copy.deepcopy(caches[0]), copy.deepcopy(others[0]))]
        assert [f.shape[2] for f in fetched] == [budget + 1] * 2
        for t in (7, 8, 9):
            close(step(model, others, t), step(model, caches, t))
        assert [kept(c) for c in others] == [kept(c) for c in caches]


def test_d05_kv_bits_is_refused_and_no_row_is_made_up(model: Any, tokenizer: Any) -> None:
    for name in EVICTING:
        policy = make_policy(name)
        with attached(model, policy, budget_of(policy)):
            with pytest.raises(ValueError, match="kv_bits"):
                mlx_lm.generate(model, tokenizer, a_prompt(150), max_tokens=3, kv_bits=8, quantized_kv_start=0)
            caches = mlx_cache.make_prompt_cache(model)
            answer(model, tokenizer, a_prompt(150), 3, prompt_cache=caches)
            for c in caches:
                with pytest.raises(ValueError, match="quantized"):
                    c.to_quantized(group_size=32, bits=8)
                keys, values, *_ = c.state  # every stored row is a row that came in
                assert keys.shape[2] == values.shape[2] == c.size() == budget_of(policy)
                assert mx.all(mx.abs(keys).sum(axis=-1) > 0).item()


def wide() -> Any:
    """Rows large enough that a leak of one per token shows."""
    return tiny_llama(num_attention_heads=2, head_dim=64, hidden_size=32, intermediate_size=32)


def memory_while_decoding(
    model: Any, tokenizer: Any, policy: Policy, budget: int, prompt: int, tokens: int, at: tuple[int, ...]
) -> tuple[dict[int, int], list[Any]]:
    """Active bytes over an empty cache after some decoded tokens, in mlx-lm's own loop."""
    limit = mx.set_cache_limit(0)
    try:
        mx.eval(model.parameters())
        gc.collect()
        with attached(model, policy, budget):
            caches = mlx_cache.make_prompt_cache(model)
            empty = mx.get_active_memory()
            found = {}
            unending = {"logits_processors": [lambda _, logits: mx.where(mx.arange(300) == 2, -mx.inf, logits)]}
            stream = stream_generate(
                model, tokenizer, a_prompt(prompt), max_tokens=tokens + 1, prompt_cache=caches, **unending
            )
            for n, response in enumerate(stream, 1):
                if n in at:
                    del response
                    mx.synchronize()
                    gc.collect()
                    found[n] = mx.get_active_memory() - empty
                if n == tokens:
                    break
            stream.close()
            assert set(found) == set(at)
            return found, caches
    finally:
        mx.set_cache_limit(limit)


IN_FLIGHT = 4 * 1024  # one step ahead: logits of 300 tokens, the tokens so far
ONE_OF_EACH = ["streaming", "h2o", "keyformer", "keyformer_proxy", "snapkv", "keydiff"]  # kinds of bookkeeping


@pytest.mark.parametrize("name", ["full", *ONE_OF_EACH])
def test_d06_no_lazy_graph_below_the_budget(tokenizer: Any, name: str) -> None:
    policy = make_policy(name)
    found, caches = memory_while_decoding(wide(), tokenizer, policy, 4096, 110, 140, (20, 140))
    assert all(c.size() == c.offset for c in caches)
    allocated = sum(c.nbytes for c in caches)
    assert found[140] - found[20] < 1024  # 130 to 250 rows, within one step of the allocation
    assert found[140] == pytest.approx(allocated, rel=0.05, abs=IN_FLIGHT)
    # 256 rows in 2 heads of 2 layers: keys and values of 64 floats, and 16 bytes
    assert allocated <= 1.01 * 256 * 2 * 2 * (2 * 64 * 4 + 16 + 4 * policy.window)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_d07_no_growth_above_the_budget(tokenizer: Any, name: str) -> None:
    policy = make_policy(name)
    budget = budget_of(policy, 63)
    found, caches = memory_while_decoding(wide(), tokenizer, policy, budget, 80, 120, (20, 120))
    assert found[120] - found[20] < 1024
    assert all(c.size() == budget for c in caches)
    allocated = sum(c.nbytes for c in caches)
    assert found[120] == pytest.approx(allocated, rel=0.05, abs=IN_FLIGHT)
    assert allocated <= 1.01 * (budget + 1) * 2 * 2 * (2 * 64 * 4 + 16 + 4 * policy.window)


@pytest.mark.parametrize("policy", [H2O(), Keyformer(), KeyformerProxy()], ids=lambda p: p.name)
def test_d08_late_tokens_are_not_evicted_on_arrival(policy: Policy) -> None:
    """At the defaults of every policy that adds up mass, the newest rows are there for the next query."""
    budget, stream = 64, Stream.random(0, 512, 4, 2, 16, 16)
    cache = KeyformerKVCache(policy, budget)
    cache.begin_prefill()
    attend(cache, *stream.part(0, 256), stream.scale)
    cache.end_prefill()
    recent = policy.recent_rows(budget)
    assert recent >= budget // 4
    for at in range(256, 512):
        attend(cache, *stream.part(at, at + 1), stream.scale)
        if at % 16 == 0:
            for head in kept(cache):
                assert head[-recent:] == list(range(at + 1 - recent, at + 1))
    for head in kept(cache):
        assert sum(p >= 256 for p in head) >= recent


def test_d08_and_other_policies_turn_over() -> None:
    """With no window of recent rows: those that do not add up keep late rows as readily as early ones."""
    stream = Stream.random(0, 1024, 4, 2, 16, 16)
    for policy in (make_policy("random", recent=0), make_policy("tova"), make_policy("knorm"), H2O(window=8)):
        cache = KeyformerKVCache(policy, 64)
        cache.begin_prefill()
        attend(cache, *stream.part(0, 512), stream.scale)
        cache.end_prefill()
        for at in range(512, 1024):
            attend(cache, *stream.part(at, at + 1), stream.scale)
        late = [p >= 512 for head in kept(cache) for p in head]
        assert np.mean(late) > 0.25, policy


@pytest.mark.parametrize("name", EVICTING)
def test_d09_survival_is_told_by_position(name: str) -> None:
    """Rows that look alike under any projection are still told apart: the row at position p is the row that came."""
    policy = make_policy(name)
    budget, n = budget_of(policy, 24), 120
    stream = Stream.random(1, n, 4, 2, 16, 16)
    burst = mx.array(np.full(16, 0.7, np.float32))
    for p in (30, 31, 32, 90):  # the same key four times
        stream.k[:, :, p] = burst
    stream.v[..., 0] = mx.arange(n, dtype=mx.float32)  # and a tag in the values
    cache = KeyformerKVCache(policy, budget)
    cache.begin_prefill()
    for first in (0, 50):
        attend(cache, *stream.part(first, first + 50), stream.scale)
    cache.end_prefill()
    for at in range(100, n):
        attend(cache, *stream.part(at, at + 1), stream.scale)
    keys, values, *_ = cache.state
    for h, head in enumerate(kept(cache)):
        assert len(head) == len(set(head)) == budget
        assert values[0, h, :, 0].tolist() == head
        assert mx.array_equal(keys[0, h], stream.k[0, h, mx.array(head)])


@pytest.mark.parametrize("name", EVICTING)
def test_d10_a_metric_sees_eviction(model: Any, name: str) -> None:
    """Scoring a continuation: one pass over everything would show no loss at all; fed as decode would, it shows."""
    context, continuation = a_prompt(200), a_prompt(20, 7)
    policy = make_policy(name)

    def by_decoding(policy: Policy, chunk: int) -> float:
        caches = make_prompt_cache(model, policy, budget_of(policy))
        feed(model, caches, mx.array(context[:-1]), chunk)
        loss = 0.0
        for t, target in zip((context[-1], *continuation), continuation, strict=False):
            logits = step(model, caches, t)[0]
            loss += (mx.logsumexp(logits) - logits[target]).item()
        return loss

    with attached(model):
        whole = [
            model(mx.array(context + continuation)[None], cache=make_prompt_cache(model, p, budget_of(p)))
            for p in (Full(), policy)
        ]
        assert mx.array_equal(*whole)  # the trap
        full, ours = by_decoding(Full(), 64), by_decoding(policy, 64)
        assert abs(full - ours) > 0.1
        assert by_decoding(policy, 256) == pytest.approx(ours, abs=1e-3)  # whatever the chunks of the prompt


@pytest.mark.parametrize("name", EVICTING)
def test_d11_kept_rows_of_every_layer_ignore_the_chunks(name: str) -> None:
    model = tiny_llama(num_hidden_layers=4)
    policy = make_policy(name)
    found = []
    with attached(model):
        for chunk in (1, 16, 200):
            caches = make_prompt_cache(model, policy, budget_of(policy))
            feed(model, caches, mx.array(a_prompt(50)), chunk)
            found.append([kept(c) for c in caches])
    assert all(f == found[0] for f in found)
    assert len(found[0]) == 4


def test_d12_sliding_layers_keep_their_own_cache_and_heads_their_own_rows() -> None:
    arguments = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=32,
        num_hidden_layers=4,
        intermediate_size=64,
        num_attention_heads=4,
        head_dim=8,
        query_pre_attn_scalar=8,
        vocab_size=300,
        num_key_value_heads=2,
        sliding_window=48,
        sliding_window_pattern=2,
    )
    model = randomize(gemma3_text.Model(arguments))
    caches = make_prompt_cache(model, H2O(), 24)
    assert [type(c) for c in caches] == [RotatingKVCache, KeyformerKVCache] * 2
    assert keyformer.cache_counts(caches) == {"RotatingKVCache": 2, "KeyformerKVCache": 2}
    assert [c.max_size for c in caches[::2]] == [48, 48]
    with attached(model):
        # a budget that holds everything: chunks of 8 tokens, past the window, agree with mlx-lm's caches
        large, plain = make_prompt_cache(model, H2O(), 200), model.make_cache()
        for first in range(0, 96, 8):
            chunk = mx.array(a_prompt(96)[first : first + 8])[None]
            assert mx.array_equal(model(chunk, cache=large), model(chunk, cache=plain))
        feed(model, caches, mx.array(a_prompt(96)), 8)
        for t in range(8):
            step(model, caches, t)
    for c in caches[1::2]:
        one, two = kept(c)
        assert one != two  # each head its own
        assert len(one) == len(two) == 24
        with pytest.raises(ValueError, match="window"):
            c.make_mask(8, window_size=48)


@pytest.mark.parametrize("name", EVICTING)
def test_d13_left_padding_and_ragged_batches(model: Any, name: str) -> None:
    policy = make_policy(name)
    budget = budget_of(policy)
    prompts = [a_prompt(60), a_prompt(11)]
    with attached(model):
        singles = [make_prompt_cache(model, policy, budget) for _ in prompts]
        batch = [layer[0].merge(list(layer)) for layer in zip(*singles, strict=True)]
        for c in batch:
            c.begin_prefill()
            c.prepare(left_padding=[0, 49])
        together = model(mx.array([prompts[0], [0] * 49 + prompts[1]]), cache=batch)[:, -1]
        for c in batch:
            c.end_prefill()
        for i, caches in enumerate(singles):
            close(together[i], feed(model, caches, mx.array(prompts[i]), 60)[0])
        for t in range(5):
            together = step(model, batch, t, t + 9)
            for i, caches in enumerate(singles):
                close(together[i], step(model, caches, t + 9 * i)[0])
        for i, caches in enumerate(singles):
            assert [kept(c.extract(i)) for c in batch] == [kept(c) for c in caches]


@pytest.mark.parametrize("name", EVICTING)
def test_d14_the_row_of_a_batch_does_not_matter(model: Any, tokenizer: Any, name: str) -> None:
    """The noise too belongs to layer, head and position, not to the place in the batch."""
    policy = make_policy(name)
    with attached(model, policy, budget_of(policy)):
        single = mlx_cache.make_prompt_cache(model)
        expected = answer(model, tokenizer, a_prompt(90), 9, prompt_cache=single)
        batch = batch_generate(
            model,
            tokenizer,
            [a_prompt(70), a_prompt(90), a_prompt(5), a_prompt(90)],
            max_tokens=len(expected),
            return_prompt_caches=True,
            return_token_ids=True,
        )
    for row in (1, 3):
        assert batch.token_ids[row] == [t for t in expected if t not in tokenizer.eos_token_ids]
        assert [kept(c) for c in batch.caches[row]] == [kept(c) for c in single]


def test_d15_float32_stays_float32(model: Any) -> None:
    with attached(model):
        plain, ours = mlx_cache.make_prompt_cache(model), make_prompt_cache(model, Keyformer(), 400)
        for chunk in (a_prompt(100), a_prompt(30), [7], [8]):
            assert mx.array_equal(*(model(mx.array(chunk)[None], cache=c) for c in (plain, ours)))
    stream = Stream.random(0, 40, 4, 2, 16, 16)
    stream.k[..., 3] = 1e5
    cache = KeyformerKVCache(KeyformerProxy(), 12)
    attend(cache, *stream.part(0, 30), stream.scale)
    cache.end_prefill()
    for at in range(30, 40):
        attend(cache, *stream.part(at, at + 1), stream.scale)
    assert mx.all(cache.state[0][..., 3] == 1e5).item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("name", EVICTING)
def test_d16_half_precision_keeps_its_type_and_its_range(name: str, dtype: mx.Dtype) -> None:
    policy = make_policy(name)
    budget = budget_of(policy, 12)
    stream = Stream.random(0, 60, 4, 2, 16, 16)
    largest = 1e5 if dtype == mx.bfloat16 else 6e4
    q, k, v = (a.astype(dtype) for a in stream.part(0, 60))
    v[..., 3] = largest
    cache = KeyformerKVCache(policy, budget)
    cache.begin_prefill()
    attend(cache, q[:, :, :50], k[:, :, :50], v[:, :, :50], stream.scale)
    cache.end_prefill()
    for at in range(50, 60):
        one = slice(at, at + 1)
        mask = cache.make_mask(1)
        fetched = cache.update_and_fetch(k[:, :, one], v[:, :, one])
        assert [a.dtype for a in fetched] == [dtype] * 2
        assert fetched[0].shape[2] == budget + 1
        mx.eval(fetched, cache.observe(q[:, :, one], fetched[0], scale=stream.scale, mask=mask))
    keys, values, *_ = cache.state
    assert keys.dtype == values.dtype == dtype
    assert mx.array_equal(values[..., 3], mx.full(values.shape[:3], largest, dtype))
    row_bytes = 2 * 16 * 2  # keys and values, 2 bytes each
    assert cache.nbytes <= 1.1 * (budget + 1) * 2 * (row_bytes + 16 + 4 * policy.window)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("name", EVICTING)
def test_d17_a_bad_key_goes_first_and_costs_no_sink(name: str, value: float) -> None:
    policy = make_policy(name, n_sink=4, recent=4)
    budget = 12
    for prefill, cuts in (("full", (30,)), ("full", (7, 30)), ("chunked", (7, 30)), ("full", (3,))):
        stream = Stream.random(2, 60, 4, 2, 8, 8)
        stream.k[0, 0, 6, 3] = value
        cache = KeyformerKVCache(policy, budget, prefill=prefill)
        cache.begin_prefill()
        for first, last in zip((0, *cuts), cuts, strict=False):
            attend(cache, *stream.part(first, last), stream.scale)
        cache.end_prefill()
        for at in range(cuts[-1], 60):
            attend(cache, *stream.part(at, at + 1), stream.scale)
        one, two = kept(cache)
        assert one[:4] == two[:4] == [0, 1, 2, 3]
        assert one[-4:] == two[-4:] == [56, 57, 58, 59]
        assert 6 not in one
        keys, _, scores, *_ = cache.state
        assert mx.all(mx.isfinite(keys)).item()
        assert mx.all(mx.isfinite(scores)).item()  # no other row's score has been spoilt
        if POLICIES[name]().attention in ("query", "key"):
            assert scores[0, 0].max().item() > 0


def test_d17_on_the_functional_path_too() -> None:
    keys = mx.random.normal((2, 60, 8), key=mx.random.key(1))
    keys[0, 6, 3] = math.nan
    out = keyformer_update_batched(
        *[None] * 5, keys, keys, 4, 12, 4, 1.0, 1.0, 0, 1e4, 0, 0, [1, 2], position_mode="original"
    )
    for head in out[4].tolist():
        assert head[:4] == [0, 1, 2, 3]
        assert head[-4:] == [56, 57, 58, 59]
    assert 6 not in out[4][0].tolist()


BAD_CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("tau_init", {"tau_init": math.nan}),
    ("tau_init", {"tau_init": math.inf}),
    ("tau_end", {"tau_end": math.nan, "anneal_steps": 3}),
    ("tau_end", {"tau_init": 2.0, "tau_end": 1.0, "anneal_steps": 3}),
    ("n_sink", {"n_sink": -1}),
    ("n_sink", {"n_sink": 1.5}),
    ("recent", {"recent": -1}),
    ("recent", {"recent": 1.5}),
    ("anneal_steps", {"anneal_steps": -1}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 2**64}),
]


@pytest.mark.parametrize(("name", "choices"), BAD_CHOICES, ids=str)
def test_d18_bad_values_are_refused_where_they_are_given(name: str, choices: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*expected.*got"):
        KeyformerProxy(**choices)
    whole = {"n_sink": 0, "budget": 9, "head_dim": 8} | choices
    with pytest.raises(ValueError, match=rf"{name}.*expected.*got"):
        init_keyformer_state(**whole)


@pytest.mark.parametrize("budget", [0, -3, 8.9, True, "9", None, 4])
def test_d18_bad_budgets_are_refused_where_they_are_given(model: Any, budget: Any) -> None:
    policy = KeyformerProxy(recent=2)  # and 4 sinks: at least 7
    for make in (
        lambda: KeyformerKVCache(policy, budget),
        lambda: make_prompt_cache(model, policy, budget),
        lambda: attached(model, policy, budget).__enter__(),
        lambda: init_keyformer_state(n_sink=4, budget=budget, head_dim=8, recent=2),
    ):
        with pytest.raises(ValueError, match=r"budget.*got|got.*budget"):
            make()
    assert all(type(c) is KVCache for c in mlx_cache.make_prompt_cache(model))


@pytest.mark.parametrize("name", POLICIES)
def test_d19_keys_and_values_of_other_sizes_no_tokens_and_other_batches(name: str) -> None:
    policy = make_policy(name)
    budget = budget_of(policy, 12)
    stream = Stream.random(0, 60, 4, 2, 24, 10)
    cache = KeyformerKVCache(policy, budget)
    cache.begin_prefill()
    none = cache.update_and_fetch(mx.zeros((1, 2, 0, 24)), mx.zeros((1, 2, 0, 10)))
    assert [a.shape for a in none] == [(1, 2, 0, 24), (1, 2, 0, 10)]
    out = attend(cache, *stream.part(0, 50), stream.scale)
    assert out.shape == (1, 4, 50, 10)
    cache.end_prefill()
    for at in range(50, 60):
        attend(cache, *stream.part(at, at + 1), stream.scale)
    keys, values, *_ = cache.state
    rows = budget if policy.evicts else 60
    assert (keys.shape, values.shape) == ((1, 2, rows, 24), (1, 2, rows, 10))
    for h, head in enumerate(kept(cache)):
        assert mx.array_equal(values[0, h], stream.v[0, h, mx.array(head)])
    with pytest.raises(ValueError, match=r"batch of 1, got 2.*merge"):
        cache.update_and_fetch(mx.zeros((2, 2, 1, 24)), mx.zeros((2, 2, 1, 10)))


def test_d20_trimming_says_what_it_does(model: Any, tokenizer: Any) -> None:
    for name in EVICTING:
        policy = make_policy(name)
        budget = budget_of(policy)
        with attached(model, policy, budget):
            caches = mlx_cache.make_prompt_cache(model)
            answer(model, tokenizer, a_prompt(90), 4, prompt_cache=caches)
            assert not mlx_cache.can_trim_prompt_cache(caches)
            before = [(kept(c), c.offset) for c in caches]
            assert mlx_cache.trim_prompt_cache(caches, 3) == 0
            assert [c.trim(3) for c in caches] == [0, 0]
            assert [(kept(c), c.offset) for c in caches] == before
            with pytest.raises(ValueError, match="draft"):
                answer(model, tokenizer, a_prompt(9), 4, draft_model=tiny_llama(seed=1))
            with pytest.raises(ValueError, match="max_kv_size"):
                answer(model, tokenizer, a_prompt(9), 4, max_kv_size=40)


def test_d20_a_branching_chat_reuses_its_prefix_where_that_is_right(model: Any, tokenizer: Any) -> None:
    """A cache that has neither scored nor evicted is taken back to the common prefix; any other one is never used."""
    shared, one, two = a_prompt(60), a_prompt(9, 1), a_prompt(11, 2)
    for policy, reused in ((Full(), 60), (Window(), 60), (Keyformer(), 0)):
        with attached(model, policy, 100):
            alone = mlx_cache.make_prompt_cache(model)
            words = answer(model, tokenizer, shared + one, 4, prompt_cache=alone)
            fresh = answer(model, tokenizer, shared + two, 50)
            in_a_batch = batch_generate(
                model, tokenizer, [a_prompt(8), shared + one], max_tokens=4, return_prompt_caches=True
            ).caches[1]
            for stored in (alone, in_a_batch):
                lru = LRUPromptCache()
                lru.insert_cache("model", shared + one + words, stored)
                caches, rest = lru.fetch_nearest_cache("model", shared + two)
                assert len(shared + two) - len(rest) == reused
                caches = caches or mlx_cache.make_prompt_cache(model)
                assert answer(model, tokenizer, rest, 50, prompt_cache=caches) == fresh


def test_d21_mlx_lm_is_pinned_to_the_version_this_is_made_for() -> None:
    """And nothing here takes a state for a pair of keys and values: states differ between versions and caches."""
    dependencies = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [d for d in dependencies if d.startswith("mlx-lm")] == [f"mlx-lm=={mlx_lm.__version__}"]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("dtype", [mx.float16], ids=str)
def test_d22_bytes_and_sizes_tell_the_truth(name: str, dtype: mx.Dtype) -> None:
    """nbytes is what the allocator gave, bookkeeping included; size() is rows, offset is tokens."""
    policy = make_policy(name)
    budget = budget_of(policy, 63)
    stream = Stream.random(0, 330, 2, 2, 64, 64)
    q, k, v = (a.astype(dtype) for a in stream.part(0, 330))
    mx.eval(q, k, v)
    limit = mx.set_cache_limit(0)
    try:
        gc.collect()
        empty = mx.get_active_memory()
        cache = KeyformerKVCache(policy, budget)
        assert (cache.nbytes, cache.size(), cache.offset, cache.empty()) == (0, 0, 0, True)
        cache.begin_prefill()
        attend(cache, q[:, :, :300], k[:, :, :300], v[:, :, :300], 0.125)
        assert (cache.size(), cache.offset) == (300, 300)
        cache.end_prefill()
        for at in range(300, 330):
            attend(cache, q[:, :, at : at + 1], k[:, :, at : at + 1], v[:, :, at : at + 1], 0.125)
        mx.synchronize()
        gc.collect()
        assert mx.get_active_memory() - empty == pytest.approx(cache.nbytes, rel=0.05)
    finally:
        mx.set_cache_limit(limit)
    rows = budget if policy.evicts else 330
    assert (cache.size(), cache.offset) == (rows, 330)
    assert cache.state[0].shape[2] == len(kept(cache)[0]) == rows
    capacity = budget + 1 if policy.evicts else 512
    keys_and_values = capacity * 2 * 2 * 64 * dtype.size
    known = 16 + 4 * policy.window if policy.evicts else 0  # "full" needs to know nothing of its rows
    assert keys_and_values <= cache.nbytes <= 1.01 * (keys_and_values + capacity * 2 * known)
    assert not policy.evicts or cache.nbytes > keys_and_values


@pytest.mark.parametrize("head_size", [1, 13, 33, 65])
@pytest.mark.parametrize("name", EVICTING)
def test_d23_odd_head_sizes(name: str, head_size: int) -> None:
    """On this machine's default device, whatever it is."""
    policy = make_policy(name)
    budget = budget_of(policy, 12)
    stream = Stream.random(0, 60, 3, 1, head_size, head_size)
    cache = KeyformerKVCache(policy, budget)
    cache.begin_prefill()
    attend(cache, *stream.part(0, 55), stream.scale)
    cache.end_prefill()
    for at in range(55, 60):
        attend(cache, *stream.part(at, at + 1), stream.scale)
    assert mx.array_equal(cache.state[0][0, 0], stream.k[0, 0, mx.array(kept(cache)[0])])
    keys, values = stream.k[0], stream.v[0]
    out = keyformer_update_batched(
        *[None] * 5, keys, values, 2, 12, 2, 1.0, 1.0, 0, 1e4, 0, 0, [1], position_mode="original"
    )
    assert mx.array_equal(out[0][0], keys[0, out[4][0]])
