"""Layers that decide together do what each would have done alone, whoever asks whatever in between."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache
from small import KINDS, a_policy, kept_positions
from tiny_models import build

from keyformer import H2O, KeyformerKVCache, KeyformerProxy, Policy, attached, make_prompt_cache
from keyformer.layers import LayerGroup, group_layers

PROMPT, STEPS, BUDGET = 40, 12, 20


def ours(caches: list[Any]) -> list[KeyformerKVCache]:
    return [c for c in caches if isinstance(c, KeyformerKVCache)]


def token(at: int, batch: int = 1) -> mx.array:
    return mx.array([[(at * 7 + b) % 90] for b in range(batch)])


def prompt(model: Any, policy: Policy, most: int, budget: int = BUDGET, **options: Any) -> list[Any]:
    caches = make_prompt_cache(model, policy, budget, **options)
    group_layers(ours(caches), most)
    for c in ours(caches):
        c.begin_prefill()
    with attached(model):
        mx.eval(model(mx.arange(PROMPT)[None] % 90, cache=caches))
    for c in ours(caches):
        c.end_prefill()
    return caches


def decode(model: Any, caches: list[Any], steps: int, first: int = 0) -> list[mx.array]:
    logits = []
    with attached(model):
        for at in range(first, first + steps):
            logits.append(model(token(at), cache=caches))
            mx.eval(logits[-1])
    return logits


def same(one: list[Any], two: list[Any]) -> None:
    for a, b in zip(ours(one), ours(two), strict=True):
        assert kept_positions(a) == kept_positions(b)
        assert mx.array_equal(a.ranks(), b.ranks())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "full"])
@pytest.mark.parametrize("most", [2, 3, 7])
def test_groups_decide_as_layers_alone_do(kind: str, most: int) -> None:
    model = build("llama", num_hidden_layers=5)
    runs = []
    for size in (1, most):
        caches = prompt(model, a_policy(kind, n_sink=1, recent=2, seed=3), size)
        runs.append((decode(model, caches, STEPS), caches))
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        assert mx.array_equal(a, b)
    same(runs[0][1], runs[1][1])


@pytest.mark.parametrize("kind", ["keyformer_proxy", "proxy without noise"])
@pytest.mark.parametrize("prefill", ["full", "chunked"])
@pytest.mark.parametrize("positions", ["original", "contiguous"])
def test_groups_walk_over_a_prompt_as_layers_alone_do(kind: str, prefill: str, positions: str) -> None:
    model = build("llama", num_hidden_layers=4)
    policy = a_policy(kind, n_sink=1, recent=2, seed=3)
    runs = []
    for most in (1, 3):
        caches = make_prompt_cache(model, policy, BUDGET, prefill, positions=positions)
        group_layers(caches, most)
        logits = []
        with attached(model):
            for c in caches:
                c.begin_prefill()
            for chunk in (7, 30, 1, 12):
                logits.append(model(mx.arange(chunk)[None], cache=caches))
                assert not any(c.undecided for c in caches) or most == 1
                assert len({c.size() for c in caches}) == 1
            for c in caches:
                c.end_prefill()
        logits += decode(model, caches, STEPS)
        runs.append((logits, caches))
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5)
    assert [kept_positions(c) for c in runs[0][1]] == [kept_positions(c) for c in runs[1][1]]
    assert runs[1][1][0].size() == BUDGET


def test_a_prompts_rows_that_wait_are_walked_over_when_somebody_asks() -> None:
    """The first of two layers has attended, the second has not."""
    model = build("llama", num_hidden_layers=2)
    questions = {
        "size": lambda c: c.size(),
        "slots": lambda c: c.slots(),
        "kept": lambda c: c.kept().tolist(),
        "state": lambda c: c.state[3].tolist(),
        "mask": lambda c: c.make_mask(3, return_array=True).tolist(),
        "copy": lambda c: copy.deepcopy(c).size(),
        "merge": lambda c: KeyformerKVCache.merge([c]).sizes(),
        "nbytes": lambda c: c.nbytes,
    }
    for name, question in questions.items():
        answers = []
        for most in (1, 2):
            caches = make_prompt_cache(model, KeyformerProxy(seed=1), BUDGET, "chunked")
            group_layers(caches, most)
            caches[0].begin_prefill()
            hidden = model.model.embed_tokens(mx.arange(40)[None])
            mx.eval(model.model.layers[0](hidden, "causal", caches[0]))
            assert caches[0].undecided == (most == 2)
            answers.append(question(caches[0]))
        assert answers[0] == answers[1], name


def test_a_prompt_that_nobody_ends_is_walked_over_before_the_first_decoded_token() -> None:
    """A key policy, called without the hook: the first one-token call ends the prompt of each layer in turn."""
    model = build("llama", num_hidden_layers=3)
    runs = []
    for most in (1, 3):
        caches = make_prompt_cache(model, KeyformerProxy(seed=1), BUDGET)
        group_layers(caches, most)
        logits = [model(mx.arange(PROMPT)[None], cache=caches)]
        logits += [model(token(at), cache=caches) for at in range(4)]
        runs.append((logits, caches))
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5)
    assert [kept_positions(c) for c in runs[0][1]] == [kept_positions(c) for c in runs[1][1]]
    assert [c.sizes() for c in runs[1][1]] == [[BUDGET]] * 3


def test_a_batch_knows_how_many_rows_another_layer_left_it() -> None:
    """The last layer's end_prefill walks for all; those before it must not go on with the rows they had until then."""
    model = build("llama", num_hidden_layers=3)
    runs = []
    for most in (1, 3):
        rows = [make_prompt_cache(model, KeyformerProxy(seed=1), BUDGET) for _ in "ab"]
        batch = [KeyformerKVCache.merge(list(layer)) for layer in zip(*rows, strict=True)]
        for c in batch:
            c.begin_prefill()
        group_layers(batch, most)
        logits = [model(mx.arange(PROMPT)[None] + mx.array([[0], [30]]), cache=batch)]
        for c in batch:
            c.end_prefill()
        assert [c.slots() for c in batch] == [[BUDGET] * 2] * 3
        for c in batch:
            c.begin_prefill()
        logits.append(model(mx.arange(9)[None] + mx.array([[0], [30]]), cache=batch))
        for c in batch:
            c.end_prefill()
        for at in range(3):
            mask = batch[0].make_mask(1)
            assert mask is None or mask.shape[-1] == BUDGET + 1
            logits.append(model(token(at, 2), cache=batch))
        assert [c.slots() for c in batch] == [[BUDGET + 1] * 2] * 3
        runs.append((logits, [c.extract(i) for c in batch for i in (0, 1)]))
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5)
    assert [kept_positions(c) for c in runs[0][1]] == [kept_positions(c) for c in runs[1][1]]


def test_the_sequences_of_a_batch_walk_layer_by_layer_of_their_own() -> None:
    """Prompts of different lengths in one batch, evicted after every chunk, then decoded."""
    model = build("llama", num_hidden_layers=3)
    runs = []
    for most in (1, 2):
        rows = [make_prompt_cache(model, KeyformerProxy(seed=1), BUDGET, "chunked") for _ in "ab"]
        batch = [KeyformerKVCache.merge(list(layer)) for layer in zip(*rows, strict=True)]
        for c in batch:
            c.begin_prefill()
        group_layers(batch, most)
        assert {p.group.size for c in batch for p in c.sequences()} == ({1} if most == 1 else {1, 2})
        with attached(model):
            for c in batch:
                c.prepare(lengths=[40, 25], right_padding=[0, 15])
            for chunk in range(2):
                mx.eval(model(mx.arange(20 * chunk, 20 * chunk + 20)[None] + mx.array([[0], [30]]), cache=batch))
            for c in batch:
                c.finalize()
                c.end_prefill()
            for at in range(4):
                mx.eval(model(token(at, 2), cache=batch))
        assert batch[0].sizes() == [BUDGET, BUDGET] and batch[0].slots() == [BUDGET + 1] * 2
        runs.append([c.extract(i) for c in batch for i in (0, 1)])
    assert [kept_positions(c) for c in runs[0]] == [kept_positions(c) for c in runs[1]]


@pytest.mark.parametrize("layers, most, sizes", [(30, 8, [7, 8, 7, 8]), (32, 8, [8] * 4), (3, 8, [3]), (3, 1, [1] * 3)])
def test_groups_are_as_even_as_they_can_be(layers: int, most: int, sizes: list[int]) -> None:
    caches = [KeyformerKVCache(H2O(), 20, layer) for layer in range(layers)]
    group_layers(caches, most)
    groups: list[LayerGroup] = []
    for c in caches:
        if c.group not in groups:
            groups.append(c.group)
    assert [g.size for g in groups] == [sum(c.group is g for c in caches) for g in groups] == sizes


def test_nobody_waits_on_a_cpu() -> None:
    with mx.stream(mx.cpu):
        caches = make_prompt_cache(build("llama", num_hidden_layers=3), H2O(), BUDGET)
    assert [c.group.size for c in caches] == [1, 1, 1]


def test_any_question_in_the_middle_of_a_token_is_answered() -> None:
    """The first of two layers has attended, the second has not: what waits is decided when somebody asks."""
    model = build("llama", num_hidden_layers=2)
    questions = {
        "kept": lambda c: c.kept(),
        "ranks": lambda c: c.ranks(),
        "scores": lambda c: c.scores,
        "positions": lambda c: c.positions,
        "nbytes": lambda c: c.nbytes,
        "state": lambda c: c.state[:4],
        "copy": lambda c: copy.deepcopy(c).state[:4],
        "merge": lambda c: KeyformerKVCache.merge([c]).state[0][:4],
    }
    for name, question in questions.items():
        alone, grouped = prompt(model, H2O(), 1), prompt(model, H2O(), 2)
        for caches in (alone, grouped):
            decode(model, caches, 3)
            with attached(model):
                hidden = model.model.embed_tokens(token(3))
                mx.eval(model.model.layers[0](hidden, None, caches[0]))
        assert grouped[0].undecided and not alone[0].undecided
        answers = []
        for caches in (alone, grouped):
            answer = question(caches[0])
            assert not caches[0].undecided or name == "copy"
            answers.append(answer)
        flat = [a if isinstance(a, (list, tuple)) else [a] for a in answers]
        for a, b in zip(*flat, strict=True):
            assert a == b if not isinstance(a, mx.array) else mx.array_equal(a, b), name


def test_a_layer_that_comes_again_before_the_others_is_decided_first() -> None:
    model = build("llama", num_hidden_layers=2)
    alone, grouped = prompt(model, H2O(), 1), prompt(model, H2O(), 2)
    for caches in (alone, grouped):
        with attached(model):
            for at in range(4):
                mx.eval(model.model.layers[0](model.model.embed_tokens(token(at)), None, caches[0]))
    assert grouped[0].undecided
    assert kept_positions(grouped[0]) == kept_positions(alone[0])
    assert not grouped[0].undecided


def test_layers_of_different_budgets_share_a_group() -> None:
    model = build("llama", num_hidden_layers=4)
    alone, grouped = (prompt(model, H2O(), most, allocate=[1.0, 1.0, 2.0, 2.0]) for most in (1, 4))
    for a, b in zip(decode(model, alone, STEPS), decode(model, grouped, STEPS), strict=True):
        assert mx.array_equal(a, b)
    same(alone, grouped)


def test_a_group_lives_through_growth_and_more_prompt() -> None:
    """Below the budget, across a step of allocation, at the budget, then a second prompt and more decoding."""
    model = build("llama", num_hidden_layers=3)
    runs = [prompt(model, H2O(), most, budget=265) for most in (1, 3)]
    for caches in runs:
        decode(model, caches, 240)
        for c in ours(caches):
            c.begin_prefill()
        with attached(model):
            mx.eval(model(mx.arange(9)[None], cache=caches))
        for c in ours(caches):
            c.end_prefill()
        decode(model, caches, 4)
    same(*runs)
    assert runs[0][0].offset == 40 + 240 + 9 + 4


def test_a_batch_takes_its_group_along() -> None:
    """Merged, decoded, filtered, extended, and taken apart."""
    model = build("llama", num_hidden_layers=3)
    runs = []
    for most in (1, 3):
        batch = [KeyformerKVCache.merge([a, b]) for a, b in zip(*(prompt(model, H2O(), 1) for _ in "ab"), strict=True)]
        more = [KeyformerKVCache.merge([c]) for c in prompt(model, H2O(), 1)]
        group_layers(batch, most)
        with attached(model):
            for at in range(5):
                mx.eval(model(token(at, 2), cache=batch))
            for c in batch:
                c.filter([1])
            mx.eval(model(token(5), cache=batch))
            for c, other in zip(batch, more, strict=True):
                c.extend(other)
            for at in range(6, 9):
                mx.eval(model(token(at, 2), cache=batch))
        assert batch[0].group.size == most
        runs.append([c.extract(i) for c in batch for i in (0, 1)])
    same(*runs)


def test_caches_that_were_saved_find_each_other_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keyformer.layers.backend", lambda: "metal")
    model = build("llama", num_hidden_layers=3)
    caches = prompt(model, H2O(), 3)
    save_prompt_cache(str(tmp_path / "c.safetensors"), caches)
    loaded = load_prompt_cache(str(tmp_path / "c.safetensors"))
    assert [c.group.size for c in loaded] == [1, 1, 1]
    with attached(model):
        from mlx_lm.generate import generate_step

        for _ in zip(generate_step(mx.array([1, 2, 3]), model, prompt_cache=loaded), range(3), strict=False):
            pass
    assert {id(c.group) for c in loaded} == {id(loaded[0].group)} and loaded[0].group.size == 3


def test_a_group_leaves_nothing_behind_that_holds_memory() -> None:
    """Caches dropped in the middle of a token, or of a chunk of a prompt, are gone at once."""
    model = build("llama", num_hidden_layers=4)
    for policy, prefill in ((H2O(), "full"), (KeyformerProxy(), "chunked")):
        for n in (1, 30):
            caches = prompt(model, policy, 4, prefill=prefill)
            for c in caches if n > 1 else []:
                c.begin_prefill()
            with attached(model):
                hidden = model.model.embed_tokens(mx.arange(n)[None])
                for layer, c in zip(model.model.layers[:2], caches[:2], strict=True):
                    hidden = layer(hidden, "causal" if n > 1 else None, c)
                mx.eval(hidden)
            assert [c.undecided for c in caches] == [n == 1 or policy.attention == "key"] * 2 + [False] * 2
            held = [weakref.ref(c) for c in caches]
            gc.disable()
            try:
                del caches, c
                assert [h() for h in held] == [None] * 4
            finally:
                gc.enable()


def test_a_cache_of_a_group_whose_others_are_gone_decides_alone() -> None:
    model = build("llama", num_hidden_layers=3)
    alone, grouped = prompt(model, H2O(), 1), prompt(model, H2O(), 3)
    for caches in (alone, grouped):
        with attached(model):
            hidden = model.model.embed_tokens(token(0))
            for layer, c in zip(model.model.layers[:2], caches[:2], strict=True):
                hidden = layer(hidden, None, c)
        del caches[0], c
    assert grouped[0].undecided
    assert mx.array_equal(grouped[0].ranks(), alone[0].ranks()) and not grouped[0].undecided


def test_memory_does_not_grow_from_token_to_token() -> None:
    model = build("llama", num_hidden_layers=4)
    for kind in ("keyformer", "h2o, last 3", "keyformer_proxy"):
        caches = prompt(model, a_policy(kind), 4)
        decode(model, caches, 3)
        before = mx.get_active_memory()
        decode(model, caches, 60)
        assert mx.get_active_memory() < before + 60 * 2 * caches[0].row_bytes
