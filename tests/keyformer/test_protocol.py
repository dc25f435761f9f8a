"""Every way in which mlx-lm uses a cache, seen from outside: generate, stream_generate, batch_generate, prefix reuse,
saved prompts, and the batch operations behind them. Each must give what the same prompt gives alone.

Kept positions are read from `state`, logits through a logits processor. Kept sets are compared for equality (no near
tie has been met with these prompts) and float32 logits to 1e-5.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import batch_generate, stream_generate
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import KVCache, LRUPromptCache, load_prompt_cache, save_prompt_cache
from small import feed, step, tiny_llama

from keyformer import (
    H2O,
    POLICIES,
    BatchKeyformerKVCache,
    Keyformer,
    KeyformerKVCache,
    Policy,
    Window,
    attached,
    make_policy,
    make_prompt_cache,
)

PROJECT = Path(__file__).resolve().parents[2]
generating = sys.modules["mlx_lm.generate"]
CHOICES: dict[str, Policy] = {name: make_policy(name) for name in POLICIES} | {
    "last 5 queries": H2O(window=5, recent=2),
    "decay, count": Policy(decay=0.8, normalize="count", n_sink=2, recent=2),
    "count": H2O(normalize="count", pooling=3),
    "frozen noise": Keyformer(redraw=False, tau_init=0.7, tau_end=1.9, anneal_steps=5, seed=2**40),
    "noise at the decision": Policy(noise="select", tau_end=3.0, anneal_steps=6, recent=2),
    "proxy without noise": make_policy("keyformer_proxy", noise="none", n_sink=1),
}
NAMES = list(CHOICES)
EVICTING = [name for name in NAMES if CHOICES[name].evicts]
# one of each kind of bookkeeping
KINDS = ["full", "streaming", "h2o", "keyformer", "keyformer_proxy", "snapkv", "keydiff", "decay, count"]
PREFILLS = [(name, "full") for name in NAMES] + [(name, "chunked") for name in KINDS]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Any:
    return mlx_lm.utils.load_tokenizer(tiny_model_folder)


def steady_llama(dtype: mx.Dtype = mx.float32, **changes: Any) -> Any:
    """small.tiny_llama with half its weights. With the whole ones mlx-lm's own batches differ from its own single
    sequences by 1.9e-5, with these by 3e-6, which is below the tolerance for our caches. Eviction moves logits by 3.
    """
    model = tiny_llama(dtype, **changes)
    halved = [(name, p * 0.5 if p.ndim > 1 else p) for name, p in tree_flatten(model.parameters())]
    model.update(tree_unflatten(halved))
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return steady_llama()


def a_prompt(n: int, seed: int = 0) -> list[int]:
    """n random tokens, none special and none twice, nor in a prompt of another seed: in the first layer the keys of a
    repeated token have the same norm, a tie for the policy that goes by it.
    """
    first, last = ((3, 150), (150, 225), (225, 260), (260, 300))[min(seed, 3)]
    return (first + np.random.default_rng([n, seed]).permutation(last - first)[:n]).tolist()


def rows_for(policy: Policy, rows: int = 14) -> int:
    """A small budget that the policy accepts."""
    return max(rows, policy.least_budget() + 2)


class Seen(dict[tuple[int, ...], np.ndarray]):
    """A logits processor that notes which logits followed which tokens."""

    def __call__(self, context: mx.array, logits: mx.array) -> mx.array:
        self[tuple(context.tolist())] = np.array(logits[0].astype(mx.float32))
        return logits

    def after(self, prompt: Sequence[int]) -> dict[tuple[int, ...], np.ndarray]:
        """What followed one of several prompts."""
        return {context: v for context, v in self.items() if context[: len(prompt)] == tuple(prompt)}


def same_logits(ours: dict[tuple[int, ...], np.ndarray], theirs: dict[tuple[int, ...], np.ndarray]) -> None:
    assert set(ours) == set(theirs)  # the same tokens, then
    assert ours
    for context, logits in ours.items():
        np.testing.assert_allclose(logits, theirs[context], atol=1e-5, rtol=0)


def kept(caches: list[Any]) -> list[list[list[int]]]:
    """Per layer and KV head: the positions of the stored rows, in temporal order, as they would be saved."""
    return [c.state[3][0].tolist() if not c.empty() else [] for c in caches]


def alone(
    model: Any, tokenizer: Any, prompt: list[int], tokens: int, caches: list[Any] | None = None, **options: Any
) -> tuple[list[int], Seen, list[Any]]:
    """The answer of stream_generate, its logits and its caches."""
    seen = Seen()
    caches = mlx_cache.make_prompt_cache(model) if caches is None else caches
    options = {"max_tokens": tokens, "prompt_cache": caches, "logits_processors": [seen]} | options
    answer = [r.token for r in stream_generate(model, tokenizer, prompt, **options)]
    return answer, seen, caches


def by_hand(
    model: Any, caches: list[Any], prompt: list[int], answer: Sequence[int], chunk: int = 2048
) -> dict[tuple[int, ...], np.ndarray]:
    """ALGORITHM.md's schedule without mlx-lm: all but the last token are the prompt, the rest is decoded."""
    if len(prompt) > 1:
        feed(model, caches, mx.array(prompt[:-1]), chunk)
    else:
        for c in caches:
            c.begin_prefill()
            c.end_prefill()
    found = {}
    context = tuple(prompt)
    for t in (prompt[-1], *answer):
        context = context if not found else (*context, t)
        found[context] = np.array(step(model, caches, t)[0])
    return found


def same_rows(ours: list[Any], theirs: list[Any]) -> None:
    assert kept(ours) == kept(theirs)
    for name in ("offset", "size", "is_trimmable"):
        a, b = ([getattr(c, name) for c in caches] for caches in (ours, theirs))
        assert [f() if callable(f) else f for f in a] == [f() if callable(f) else f for f in b]


# -- alone -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "prefill"), PREFILLS)
def test_stream_generate_follows_the_schedule(model: Any, tokenizer: Any, name: str, prefill: str) -> None:
    policy = CHOICES[name]
    budget = rows_for(policy)
    for n in (1, 2, budget + 1, 60):
        with attached(model, policy, budget, prefill):
            answer, seen, caches = alone(model, tokenizer, a_prompt(n), 5, prefill_step_size=8)
        assert all(type(c) is KeyformerKVCache for c in caches)
        assert [c.offset for c in caches] == [n + len(answer)] * 2
        if policy.evicts:
            assert [c.size() for c in caches] == [min(budget, n + len(answer))] * 2
        reference = make_prompt_cache(model, policy, budget, prefill)
        with attached(model):
            same_logits(seen, by_hand(model, reference, a_prompt(n), answer, chunk=8))
        same_rows(caches, reference)


@pytest.mark.parametrize("name", KINDS)
def test_generate_evicts_without_further_words(model: Any, tokenizer: Any, name: str) -> None:
    policy = CHOICES[name]
    budget = rows_for(policy)
    prompt = a_prompt(50)
    plain = mlx_lm.generate(model, tokenizer, prompt, max_tokens=20)
    with attached(model, policy, budget):
        text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=20)
        again = mlx_lm.generate(model, tokenizer, prompt, max_tokens=20)
    with attached(model):
        given = mlx_lm.generate(
            model, tokenizer, prompt, max_tokens=20, prompt_cache=make_prompt_cache(model, policy, budget)
        )
        untouched = mlx_lm.generate(model, tokenizer, prompt, max_tokens=20)
    assert text == again == given
    assert untouched == plain
    assert (text != plain) is policy.evicts
    assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=20) == plain


@pytest.mark.parametrize("name", [*KINDS, "random", "tova", "knorm", "count"])
def test_kept_rows_do_not_depend_on_the_step_size(model: Any, tokenizer: Any, name: str) -> None:
    """Prompts around the boundaries of every step size, alone and all together."""
    policy = CHOICES[name]
    budget = rows_for(policy)
    lengths = {1: (1, 2, 17), 2: (2, 3, 4, 17), 7: (7, 8, 9, 22), 64: (64, 65, 66), 2048: (1, 66)}
    with attached(model, policy, budget):
        expected = {n: alone(model, tokenizer, a_prompt(n), 3) for n in sorted(set().union(*lengths.values()))}
        for size, prompts in lengths.items():
            for n in prompts[-1:]:
                _, seen, caches = alone(model, tokenizer, a_prompt(n), 3, prefill_step_size=size)
                same_rows(caches, expected[n][2])
                same_logits(seen, expected[n][1])
            seen = Seen()
            together = batch_generate(
                model,
                tokenizer,
                [a_prompt(n) for n in prompts],
                max_tokens=3,
                return_prompt_caches=True,
                prefill_step_size=size,
                logits_processors=[seen],
            )
            for n, caches in zip(prompts, together.caches, strict=True):
                same_rows(caches, expected[n][2])
                same_logits(seen.after(a_prompt(n)), expected[n][1])


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, mx.bfloat16) for name in NAMES] + [(name, mx.float16) for name in KINDS], ids=str
)
def test_dtype_is_kept_and_the_same_prompt_gives_the_same_tokens(tokenizer: Any, name: str, dtype: mx.Dtype) -> None:
    model = steady_llama(dtype)
    policy = CHOICES[name]
    dtypes = set()

    def processor(_: mx.array, logits: mx.array) -> mx.array:
        dtypes.add(logits.dtype)
        return logits

    prompts = [a_prompt(40), a_prompt(1)]
    options: dict[str, Any] = {"max_tokens": 6, "logits_processors": [processor]}
    with attached(model, policy, rows_for(policy)):
        answers = [alone(model, tokenizer, prompts[0], 6, logits_processors=[processor]) for _ in range(2)]
        batches = [
            batch_generate(model, tokenizer, prompts, return_token_ids=True, return_prompt_caches=True, **options)
            for _ in range(2)
        ]
    assert answers[0][0] == answers[1][0]
    assert kept(answers[0][2]) == kept(answers[1][2])
    assert batches[0].token_ids == batches[1].token_ids
    assert [kept(c) for c in batches[0].caches] == [kept(c) for c in batches[1].caches]
    assert dtypes == {dtype}
    for caches in (answers[0][2], *batches[0].caches):
        for c in caches:
            assert {c.keys.dtype, c.values.dtype, c.state[0].dtype, c.state[1].dtype} == {dtype}


# -- together ----------------------------------------------------------------------------------------------------------

LENGTHS = (1, 40, 3, 77, 18, 2, 25, 60)
TOKENS = (9, 5, 12, 7, 3, 10, 1, 6)


@pytest.mark.parametrize(("name", "prefill"), PREFILLS)
def test_batch_generate_gives_what_each_prompt_gives_alone(model: Any, tokenizer: Any, name: str, prefill: str) -> None:
    """More prompts than fit at once and answers of different lengths: sequences join and leave all the time."""
    policy = CHOICES[name]
    budget = rows_for(policy)
    prompts = [a_prompt(n) for n in LENGTHS]
    seen = Seen()
    with attached(model, policy, budget, prefill):
        together = batch_generate(
            model,
            tokenizer,
            prompts,
            max_tokens=list(TOKENS),
            return_prompt_caches=True,
            return_token_ids=True,
            return_logprobs=True,
            logits_processors=[seen],
            prefill_batch_size=3,
            completion_batch_size=4,
            prefill_step_size=16,
        )
        for i, (prompt, n) in enumerate(zip(prompts, TOKENS, strict=True)):
            answer, logits, caches = alone(model, tokenizer, prompt, n, prefill_step_size=16)
            answer = [t for t in answer if t not in tokenizer.eos_token_ids]
            assert together.token_ids[i] == answer
            same_logits(seen.after(prompt), logits)
            assert all(type(c) is KeyformerKVCache for c in together.caches[i])
            same_rows(together.caches[i], caches)
            assert all(c.size() == budget for c in caches) or not policy.evicts or len(prompt) + n < budget
            for position, probability in enumerate(together.logprobs[i]):
                row = logits[(*prompt, *answer[:position])].astype(np.float64)
                expected = row[answer[position]] - np.log(np.exp(row - row.max()).sum()) - row.max()
                assert probability == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("prefill", ["full", "chunked"])
@pytest.mark.parametrize("positions", ["original", "contiguous"])
@pytest.mark.parametrize("name", ["streaming", "h2o", "keyformer", "keyformer_proxy"])
def test_batches_with_other_positions_and_a_budget_for_each_layer(
    tokenizer: Any, name: str, positions: str, prefill: str
) -> None:
    model = steady_llama(num_hidden_layers=3)
    prompts = [a_prompt(n) for n in LENGTHS[:5]]
    seen = Seen()
    with attached(model, CHOICES[name], 14, prefill, positions=positions, allocate="pyramid"):
        together = batch_generate(
            model,
            tokenizer,
            prompts,
            max_tokens=list(TOKENS[:5]),
            return_prompt_caches=True,
            logits_processors=[seen],
            prefill_batch_size=2,
            completion_batch_size=3,
            prefill_step_size=16,
        )
        budgets = [c.budget for c in mlx_cache.make_prompt_cache(model)]
        assert sum(budgets) == 3 * 14
        assert budgets[0] > budgets[2]
        for i, (prompt, n) in enumerate(zip(prompts, TOKENS, strict=False)):
            _, logits, caches = alone(model, tokenizer, prompt, n, prefill_step_size=16)
            same_logits(seen.after(prompt), logits)
            same_rows(together.caches[i], caches)
        assert [c.size() for c in together.caches[3]] == budgets


@pytest.mark.parametrize("name", NAMES)
def test_prompt_caches_given_to_a_batch(model: Any, tokenizer: Any, name: str) -> None:
    """Histories: evicted, below budget, one token, none, and one with another budget. They are not changed."""
    policy = CHOICES[name]
    budget = rows_for(policy)
    with attached(model, policy, budget):
        histories = [alone(model, tokenizer, a_prompt(n), 5)[2] for n in (50, 4, 1)]
        histories.append(mlx_cache.make_prompt_cache(model))
        larger = make_prompt_cache(model, policy, budget + 9)
        histories.append(alone(model, tokenizer, a_prompt(33), 30, larger)[2])
        before = [kept(c) for c in histories]
        prompts = [a_prompt(n, seed=1) for n in (3, 30, 1, 20, 9)]
        seen = Seen()
        together = batch_generate(
            model,
            tokenizer,
            prompts,
            prompt_caches=histories,
            max_tokens=[4, 6, 8, 3, 7],
            return_prompt_caches=True,
            logits_processors=[seen],
            prefill_batch_size=3,
            completion_batch_size=3,
        )
        assert [kept(c) for c in histories] == before
        for i, prompt in enumerate(prompts):
            _, logits, caches = alone(model, tokenizer, prompt, [4, 6, 8, 3, 7][i], histories[i])
            same_logits(seen.after(prompt), logits)
            same_rows(together.caches[i], caches)
        if policy.evicts:
            assert [c[0].size() for c in together.caches] == [
                budget,
                budget,
                min(budget, 15),
                min(budget, 23),
                budget + 9,
            ]


@pytest.mark.parametrize("name", EVICTING)
def test_segments_and_caches_taken_out_in_the_middle(model: Any, tokenizer: Any, name: str) -> None:
    """What mlx-lm's server does: a cache leaves at the end of a segment, inside the prompt, and serves a later one."""
    policy = CHOICES[name]
    budget = rows_for(policy)
    system, question, other = a_prompt(23), a_prompt(19, seed=1), a_prompt(8, seed=2)
    with attached(model, policy, budget):
        generator = generating.BatchGenerator(
            model, max_tokens=5, prefill_step_size=16, stop_tokens=[[t] for t in tokenizer.eos_token_ids]
        )
        uids = generator.insert_segments([[list(system), list(question)], [a_prompt(70)]])
        taken = None
        finished: dict[int, list[Any]] = {}
        while len(finished) < 2:
            prompt_responses, responses = generator.next()
            for r in prompt_responses:
                if r.uid == uids[0] and r.end_of_segment and taken is None:
                    ((taken, tokens),) = generator.extract_cache([r.uid]).values()
                    assert tokens == system
            finished |= {r.uid: r.prompt_cache for r in responses if r.finish_reason}
        generator.close()
        assert taken is not None
        assert kept(taken) == [[list(range(len(system)))] * 2] * 2  # the prompt goes on: nothing is evicted yet
        for prompt, caches in ((question, finished[uids[0]]), (a_prompt(70), finished[uids[1]])):
            whole = (system if prompt is question else []) + prompt
            same_rows(caches, alone(model, tokenizer, whole, 5)[2])
        # it goes on as if the whole prompt had come at once
        _, seen, caches = alone(model, tokenizer, other, 5, copy.deepcopy(taken))
        _, expected, reference = alone(model, tokenizer, system + other, 5)
        same_rows(caches, reference)
        same_logits({tuple(system) + c: v for c, v in seen.items()}, expected)
        # and a sequence can be called off, its cache with it
        generator = generating.BatchGenerator(model, max_tokens=50, prefill_step_size=16)
        uids = generator.insert([a_prompt(30), a_prompt(40)])
        for _ in range(9):
            generator.next()
        removed = generator.remove([uids[0]], return_prompt_caches=True)
        caches, tokens = removed[uids[0]]
        assert all(c.size() == budget and c.offset == len(tokens) for c in caches)
        remaining = generator.extract_cache([uids[1]])[uids[1]][0]
        generator.next()
        generator.close()
        assert all(c.size() == budget for c in remaining)


@pytest.mark.parametrize("prefill", ["full", "chunked"])
@pytest.mark.parametrize("name", KINDS)
def test_padding_on_the_right(model: Any, tokenizer: Any, name: str, prefill: str) -> None:
    """mlx-lm's own prompt batch, its chunks shorter than the padding; two calls; a sequence of no tokens."""
    policy = CHOICES[name]
    budget = rows_for(policy)
    parts = [(a_prompt(30), a_prompt(3, 1)), (a_prompt(2), a_prompt(26, 1)), (a_prompt(11), []), ([], a_prompt(5, 1))]
    with attached(model, policy, budget, prefill):
        batch = generating.PromptProcessingBatch(
            model, [0, 1, 2, 3], [mlx_cache.make_prompt_cache(model) for _ in parts], prefill_step_size=7
        )
        batch.prompt([list(first) for first, _ in parts])
        batch.prompt([list(second) for _, second in parts])
        generation = batch.generate([[5], [6], [7], [8]])
        produced = [[r.token for r in generation.next()] for _ in range(9)]
        for i, (first, second) in enumerate(parts):
            caches = mlx_cache.make_prompt_cache(model)
            for c in caches:
                c.begin_prefill()
            for part in (first, second):
                for at in range(0, len(part), 7):
                    model(mx.array(part[at : at + 7])[None], cache=caches)
            for c in caches:
                c.end_prefill()
            token = 5 + i
            logits = step(model, caches, token)
            answer = []
            for _ in range(9):
                answer.append(int(mx.argmax(logits[0])))
                logits = step(model, caches, answer[-1])
            assert answer == [row[i] for row in produced]
            np.testing.assert_allclose(
                np.array(generation._next_logprobs[i]),
                np.array((logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0]),
                atol=1e-5,
                rtol=0,
            )
            same_rows(generation.extract_cache(i), caches)


@pytest.mark.parametrize("prefill", ["full", "chunked"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_given_to_the_cache_itself(model: Any, name: str, prefill: str, side: str) -> None:
    policy = CHOICES[name]
    budget = rows_for(policy)
    prompts = [a_prompt(n, 3) for n in (9, 31, 1, 20)]
    longest = max(map(len, prompts))
    padding = [longest - len(p) for p in prompts]
    with attached(model):
        singles = [make_prompt_cache(model, policy, budget, prefill) for _ in prompts]
        batch = [layer[0].merge(list(layer)) for layer in zip(*singles, strict=True)]
        assert all(type(c) is BatchKeyformerKVCache for c in batch)
        assert all(c.empty() for c in batch)
        for c in batch:
            c.begin_prefill()
            if side == "left":
                c.prepare(left_padding=padding)
            else:
                c.prepare(lengths=[len(p) for p in prompts], right_padding=padding)
        padded = [[0] * n + p if side == "left" else p + [0] * n for n, p in zip(padding, prompts, strict=True)]
        output = model(mx.array(padded), cache=batch)
        for c in batch:
            c.finalize()
            c.end_prefill()
        for i, (prompt, caches) in enumerate(zip(prompts, singles, strict=True)):
            expected = feed(model, caches, mx.array(prompt), longest)
            last = longest if side == "left" else len(prompt)
            np.testing.assert_allclose(np.array(output[i, last - 1]), np.array(expected[0]), atol=1e-5, rtol=0)
        assert batch[0].offset.tolist() == [len(p) for p in prompts]
        for t in (4, 9, 33, 7, 8, 9):
            logits = step(model, batch, *[t + i for i in range(4)])
            for i, caches in enumerate(singles):
                np.testing.assert_allclose(
                    np.array(logits[i]), np.array(step(model, caches, t + i)[0]), atol=1e-5, rtol=0
                )
        for i, caches in enumerate(singles):
            same_rows([c.extract(i) for c in batch], caches)
            assert [c.sizes()[i] for c in batch] == [c.size() for c in caches]


# -- the batch operations themselves -----------------------------------------------------------------------------------


def grown(model: Any, policy: Policy, budget: int, prompt: int, decoded: int, seed: int) -> list[Any]:
    caches = make_prompt_cache(model, policy, budget)
    if prompt:
        feed(model, caches, mx.array(a_prompt(prompt, seed)), 8)
    for t in a_prompt(decoded, seed + 50):
        step(model, caches, t)
    return caches


@pytest.mark.parametrize("name", NAMES)
def test_merge_extend_filter_extract(model: Any, name: str) -> None:
    """Sequences come, go and change places while they are decoded; each stays what it is alone."""
    policy = CHOICES[name]
    budget = rows_for(policy)
    with attached(model):
        singles = [
            grown(model, policy, budget + more, n, decoded, i)
            for i, (n, decoded, more) in enumerate(
                [(40, 3, 0), (5, 2, 0), (30, 0, 7), (9, 9, 3), (1, 0, 0), (26, 30, 0)]
            )
        ]
        copies = copy.deepcopy(singles)

        def merged(*which: int) -> list[Any]:
            return [layer[0].merge(list(layer)) for layer in zip(*[copies[i] for i in which], strict=True)]

        def check(batch: list[Any], live: list[int], tokens: Sequence[int]) -> None:
            for t in tokens:
                logits = step(model, batch, *[t + i for i in live])
                for row, i in enumerate(live):
                    expected = step(model, singles[i], t + i)
                    np.testing.assert_allclose(np.array(logits[row]), np.array(expected[0]), atol=1e-5, rtol=0)
            for row, i in enumerate(live):
                same_rows([c.extract(row) for c in batch], singles[i])
            assert batch[0].offset.tolist() == [singles[i][0].offset for i in live]
            assert batch[0].sizes() == [singles[i][0].size() for i in live]

        batch, more = merged(1, 0), merged(2, 3, 4)
        check(batch, [1, 0], [7, 8])
        check(more, [2, 3, 4], [5])
        for c, d in zip(batch, more, strict=True):
            c.extend(d)
        check(batch, [1, 0, 2, 3, 4], [11, 12, 13])
        for c in batch:
            c.filter([4, 1, 3])
        check(batch, [4, 0, 3], [21, 22])
        # what was taken out goes on alone, and can come back
        out = [c.extract(1) for c in batch]
        for c in batch:
            c.filter([0, 2])
        np.testing.assert_allclose(
            np.array(step(model, out, 9)), np.array(step(model, singles[0], 9)), atol=1e-5, rtol=0
        )
        same_rows(out, singles[0])
        check(batch, [4, 3], [31])
        for c, d in zip(batch, out, strict=True):
            c.extend(type(d).merge([d]))
        for c, d in zip(batch, merged(5), strict=True):
            c.extend(d)
        check(batch, [4, 3, 0, 5], [41, 42, 43])
        for c in batch:
            c.filter([3])
        check(batch, [5], [51, 52])


def test_what_does_not_belong_together_is_refused(model: Any) -> None:
    with attached(model):
        one = grown(model, H2O(), 14, 20, 0, 0)[0]
        other = grown(model, Keyformer(), 14, 20, 0, 0)[0]
        for wrong in (other, grown(model, H2O(), 14, 20, 0, 0)[1], KVCache()):
            with pytest.raises(ValueError, match="merge"):
                one.merge([one, wrong])
        with pytest.raises(ValueError, match="extend"):
            one.merge([one]).extend(other.merge([other]))
        with pytest.raises(ValueError, match="extend"):
            one.merge([one]).extend(KVCache.merge([KVCache()]))


def test_a_batch_evicts_as_a_whole_or_not_at_all(model: Any, tokenizer: Any) -> None:
    """mlx-lm lets the first prompt's cache merge all of them: a KVCache would take evicting ones for its own."""
    prompts = [a_prompt(20, 1), a_prompt(5, 1)]
    for history in (0, 30):
        for reverse in (False, True):
            caches: list[Any] = [[KVCache(), KVCache()], make_prompt_cache(model, H2O(), 14)]
            with attached(model):
                for c in caches if history else []:
                    alone(model, tokenizer, a_prompt(history), 3, c)
            if reverse:
                caches.reverse()
            mixture = pytest.raises(ValueError, match=r"got KVCache, KeyformerKVCache|got KeyformerKVCache, KVCache")
            with attached(model, H2O(), 14), mixture:
                batch_generate(model, tokenizer, prompts, prompt_caches=caches, max_tokens=4)


# -- prefix reuse ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "turns"),
    [("full", ((30, 4), (1, 3), (12, 5))), ("chunked", ((25, 4), (9, 3), (1, 3)))],
    ids=["full", "chunked"],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_chat_through_one_prompt_cache(
    model: Any, tokenizer: Any, name: str, prefill: str, turns: tuple[tuple[int, int], ...]
) -> None:
    """Three turns, one of a single token; alone and beside another conversation."""
    policy = CHOICES[name]
    budget = rows_for(policy)
    reference = make_prompt_cache(model, policy, budget, prefill)
    together: Any = None
    with attached(model, policy, budget, prefill):
        caches = mlx_cache.make_prompt_cache(model)
        for turn, (n, tokens) in enumerate(turns):
            prompt = a_prompt(n, seed=turn)
            answer, seen, _ = alone(model, tokenizer, prompt, tokens, caches, prefill_step_size=8)
            same_logits(seen, by_hand(model, reference, prompt, answer, chunk=8))
            same_rows(caches, reference)
            together = batch_generate(
                model,
                tokenizer,
                [prompt, a_prompt(14, seed=turn)],
                prompt_caches=together,
                max_tokens=len(answer),
                return_prompt_caches=True,
                prefill_step_size=8,
            ).caches
            same_rows(together[0], caches)
    if policy.evicts:
        assert all(c.size() == min(budget, c.offset) for c in caches)


@pytest.mark.parametrize("name", [*KINDS, "window"])
def test_lru_prompt_cache(model: Any, tokenizer: Any, name: str) -> None:
    """mlx-lm's store of prompts: exact, shorter and longer entries, each going on as it would have anyway."""
    policy = CHOICES[name]
    budget = rows_for(policy)
    with attached(model, policy, budget):
        for n in (9, 40):
            prompt = a_prompt(n)
            answer, _, caches = alone(model, tokenizer, prompt, 4)
            stored = [*prompt, *answer]
            lru = LRUPromptCache()
            lru.insert_cache("model", stored, copy.deepcopy(caches))
            assert lru.nbytes == sum(c.nbytes for c in caches) > 0
            more = a_prompt(6, seed=1)
            _, expected, _ = alone(model, tokenizer, more, 5, caches)

            again, rest = lru.fetch_nearest_cache("model", stored)
            assert rest == []
            same_logits(alone(model, tokenizer, more, 5, again)[1], expected)
            again, rest = lru.fetch_nearest_cache("model", stored + more)
            assert rest == more
            same_logits(alone(model, tokenizer, rest, 5, again)[1], expected)
            same_rows(again, caches)

            branch = prompt[:-2] + more
            again, rest = lru.fetch_nearest_cache("model", branch)
            _, fresh, caches = alone(model, tokenizer, branch, 5)
            if again is None:  # scored or evicted: it cannot be taken back
                assert rest == branch
                assert policy.evicts
            else:
                assert rest == more
                _, seen, _ = alone(model, tokenizer, rest, 5, again)
                same_logits({tuple(prompt[:-2]) + c: v for c, v in seen.items()}, fresh)
                same_rows(again, caches)
            if name in ("full", "window"):
                assert (again is None) is (policy.evicts and n == 40)


@pytest.mark.parametrize("name", KINDS)
def test_forks_are_independent(model: Any, tokenizer: Any, name: str) -> None:
    policy = CHOICES[name]
    with attached(model, policy, rows_for(policy)):
        _, _, trunk = alone(model, tokenizer, a_prompt(40), 5)
        before = kept(trunk)
        forks = [copy.deepcopy(trunk) for _ in range(2)]
        first = alone(model, tokenizer, a_prompt(7, seed=1), 9, forks[0])
        assert kept(trunk) == before
        assert kept(forks[1]) == before
        second = alone(model, tokenizer, a_prompt(7, seed=1), 9, forks[1])
        third = alone(model, tokenizer, a_prompt(7, seed=1), 9, trunk)
    assert first[0] == second[0] == third[0]
    for other in (second, third):
        for context, logits in first[1].items():
            assert (other[1][context] == logits).all()
        same_rows(first[2], other[2])


def phases(model: Any, policy: Policy, budget: int) -> Iterator[tuple[str, list[Any]]]:
    caches = make_prompt_cache(model, policy, budget)
    yield "empty", caches
    for c in caches:
        c.begin_prefill()
    for first in (0, 12):
        model(mx.array(a_prompt(37)[first : first + 12])[None], cache=caches)
    yield "open prompt", caches
    model(mx.array(a_prompt(37)[24:])[None], cache=caches)
    for c in caches:
        c.end_prefill()
    yield "prompt ended", caches
    for t in (5, 6, 7):
        step(model, caches, t)
    yield "decoding", caches
    for c in caches:
        c.begin_prefill()
    model(mx.array(a_prompt(5))[None], cache=caches)
    yield "second prompt", caches
    few = make_prompt_cache(model, policy, budget)
    feed(model, few, mx.array(a_prompt(3)), 8)
    step(model, few, 9)
    yield "below budget", few


@pytest.mark.parametrize("name", NAMES)
def test_state_round_trips(model: Any, name: str, tmp_path: Path) -> None:
    """from_state, the state setter, deepcopy and a saved file all go on as the original does."""
    policy = CHOICES[name]
    budget = rows_for(policy)
    path = str(tmp_path / "cache.safetensors")
    with attached(model):
        for phase, original in phases(model, policy, budget):
            copies = {
                "from_state": [type(c).from_state(c.state) for c in original],
                "setter": make_prompt_cache(model, Window(n_sink=1), 5),
                "deepcopy": copy.deepcopy(original),
            }
            for c, o in zip(copies["setter"], original, strict=True):
                c.state = o.state
            save_prompt_cache(path, original, {"phase": phase})
            copies["file"], metadata = load_prompt_cache(path, return_metadata=True)
            assert metadata == {"phase": phase}
            ahead = copy.deepcopy(original)
            outputs = [go_on(model, ahead, phase)]
            for how, caches in copies.items():
                for c, o in zip(caches, original, strict=True):
                    assert type(c) is KeyformerKVCache
                    assert (c.policy, c.budget, c.layer, c.prefill) == (o.policy, o.budget, o.layer, o.prefill)
                    assert (c.offset, c.size(), c.empty()) == (o.offset, o.size(), o.empty())
                    assert c.is_trimmable() == o.is_trimmable()
                assert kept(caches) == kept(original), (phase, how)
                outputs.append(go_on(model, caches, phase))
                np.testing.assert_allclose(outputs[-1], outputs[0], atol=1e-5, rtol=0, err_msg=f"{phase}, {how}")
                same_rows(caches, ahead)


def go_on(model: Any, caches: list[Any], phase: str) -> np.ndarray:
    """More of the prompt where one is open, its end, then a few tokens."""
    if phase in ("empty", "open prompt", "second prompt"):
        if phase == "empty":
            for c in caches:
                c.begin_prefill()
        model(mx.array(a_prompt(9, seed=4))[None], cache=caches)
        for c in caches:
            c.end_prefill()
    return np.array(mx.stack([step(model, caches, t)[0] for t in (3, 4, 5)]))


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_round_trips(model: Any, name: str, tmp_path: Path) -> None:
    policy = CHOICES[name]
    budget = rows_for(policy)
    path = str(tmp_path / "batch.safetensors")
    with attached(model):
        singles = [grown(model, policy, budget, n, 3, n) for n in (40, 2, 21)]
        batch = [layer[0].merge(list(layer)) for layer in zip(*singles, strict=True)]
        step(model, batch, 4, 5, 6)
        save_prompt_cache(path, batch)
        copies = {
            "from_state": [type(c).from_state(c.state) for c in batch],
            "deepcopy": copy.deepcopy(batch),
            "file": load_prompt_cache(path),
        }
        expected = np.array(mx.stack([step(model, batch, t, t + 1, t + 2) for t in (7, 8, 9)]))
        for how, caches in copies.items():
            assert all(type(c) is BatchKeyformerKVCache for c in caches)
            logits = np.array(mx.stack([step(model, caches, t, t + 1, t + 2) for t in (7, 8, 9)]))
            np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=0, err_msg=how)
            for row in range(3):
                same_rows([c.extract(row) for c in caches], [c.extract(row) for c in batch])


LATER = """
import json, sys
import keyformer
import mlx_lm
from mlx_lm.models.cache import load_prompt_cache

folder, prompt, files = json.loads(sys.argv[1])
model, tokenizer = mlx_lm.load(folder)[:2]
answers = []
with keyformer.attached(model):
    for path in files:
        caches = load_prompt_cache(path)
        answer = [
            r.token
            for r in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=9, prompt_cache=caches)
        ]
        rows = [c.state[3][0].tolist() for c in caches]
        answers.append([answer, rows, [type(c).__name__ for c in caches]])
print(json.dumps(answers))
"""


def test_a_conversation_goes_on_in_another_process(tiny_model_folder: Path, tmp_path: Path) -> None:
    """Saved in the middle of a chat, loaded where nothing but `import keyformer` has happened."""
    model, tokenizer = mlx_lm.load(str(tiny_model_folder))[:2]
    files, expected = [], []
    prompt = a_prompt(11, seed=1)
    for name in NAMES:
        policy = CHOICES[name]
        with attached(model, policy, rows_for(policy)):
            _, _, caches = alone(model, tokenizer, a_prompt(40), 6)
            files.append(str(tmp_path / f"{name}.safetensors"))
            save_prompt_cache(files[-1], caches)
            answer, _, caches = alone(model, tokenizer, prompt, 9, caches)
        expected.append([answer, kept(caches), ["KeyformerKVCache"] * 2])
    argument = json.dumps([str(tiny_model_folder), prompt, files])
    ran = subprocess.run([sys.executable, "-c", LATER, argument], cwd=PROJECT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for name, found, wanted in zip(NAMES, json.loads(ran.stdout), expected, strict=True):
        assert found == wanted, name


# -- options that cannot work ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_options_that_cannot_work_are_refused_at_once_and_by_name(model: Any, tokenizer: Any) -> None:
    other = tiny_llama(seed=3)
    prompt = a_prompt(30)
    calls: list[Any] = []
    original = type(model).__call__

    def counting(self: Any, *arguments: Any, **keywords: Any) -> Any:
        calls.append(self)
        return original(self, *arguments, **keywords)

    ours = make_prompt_cache(model, H2O(), 14)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        ((H2O(), 14), {"kv_bits": 8}, "kv_bits"),
        ((H2O(), 14), {"kv_bits": 8, "quantized_kv_start": 0}, "kv_bits"),
        ((H2O(), 14), {"max_kv_size": 20}, "max_kv_size"),
        ((H2O(), 14), {"draft_model": other}, "draft"),
        ((), {"kv_bits": 8, "prompt_cache": ours}, "kv_bits"),
        ((), {"max_kv_size": 20, "prompt_cache": ours}, "max_kv_size"),
        ((), {"draft_model": other, "prompt_cache": [*ours, KVCache(), KVCache()]}, "draft"),
    ]

    def refuses(run: Any, name: str) -> None:
        """Before the model is called at all."""
        calls.clear()
        type(model).__call__ = counting
        try:
            with pytest.raises(ValueError, match=name):
                run()
        finally:
            type(model).__call__ = original
        assert calls == []

    for policy, options, name in refused:
        whole = {"max_tokens": 5, **options}
        with attached(model, *policy):
            refuses(lambda o=whole: next(stream_generate(model, tokenizer, prompt, **o)), name)
            refuses(lambda o=whole: mlx_lm.generate(model, tokenizer, prompt, **o), name)
    with attached(model, H2O(), 14):
        refuses(lambda: batch_generate(model, tokenizer, [prompt], max_tokens=5, max_kv_size=20), "max_kv_size")
    with attached(other, H2O(), 14):
        refuses(lambda: next(stream_generate(model, tokenizer, prompt, draft_model=other)), "draft")
    assert all(c.empty() and c.offset == 0 for c in ours)


def test_other_peoples_caches_keep_their_options(model: Any, tokenizer: Any) -> None:
    prompt = a_prompt(30)

    def answers() -> list[list[int]]:
        wide = tiny_llama(num_hidden_layers=1, head_dim=64)
        found = []
        for options in ({"max_kv_size": 20}, {"draft_model": tiny_llama(seed=3)}):
            found.append([r.token for r in stream_generate(model, tokenizer, prompt, max_tokens=8, **options)])
        caches = mlx_cache.make_prompt_cache(wide)
        options = {"kv_bits": 8, "quantized_kv_start": 0, "prompt_cache": caches}
        found.append([r.token for r in stream_generate(wide, tokenizer, prompt, max_tokens=8, **options)])
        assert all(type(c) is mlx_cache.QuantizedKVCache for c in caches)
        return found

    plain = answers()
    with attached(model):
        assert answers() == plain
    with attached(tiny_llama(), H2O(), 14):
        assert answers() == plain


# -- undone ------------------------------------------------------------------------------------------------------------


def everything_of_mlx_lm(*models: Any) -> dict[tuple[Any, ...], Any]:
    """Every global of mlx-lm's modules and every attribute of its classes, and of the models, by identity."""
    found: dict[tuple[Any, ...], Any] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name == "mlx_lm" or module_name.startswith("mlx_lm."):
            for name, value in vars(module).items():
                if name == "__warningregistry__":
                    continue
                found[module_name, name] = value
                if isinstance(value, type) and value.__module__ == module_name:
                    # __slotnames__ is what Python's own deepcopy leaves behind
                    found |= {(module_name, name, n): v for n, v in vars(value).items() if n != "__slotnames__"}
    for i, m in enumerate(models):
        found |= {(i, name): value for name, value in vars(m).items()}
        found |= {(i, "item", name): value for name, value in m.items()}
    return found


@pytest.fixture
def undone(model: Any) -> Iterator[Any]:
    """A check that nothing of mlx-lm is other than it was; done once more at the end."""
    from mlx_lm import server  # noqa: F401  its globals count too

    before = everything_of_mlx_lm(model)

    def check() -> None:
        now = everything_of_mlx_lm(model)
        assert set(now) == set(before), set(now) ^ set(before)
        changed = [key for key, value in before.items() if now[key] is not value]
        assert changed == []

    yield check
    check()


def test_attached_is_undone(model: Any, tokenizer: Any, undone: Any) -> None:
    for arguments in ((), (H2O(), 14), (H2O(), 14, "chunked")):
        with attached(model, *arguments):
            with pytest.raises(AssertionError):
                undone()
            mlx_lm.generate(model, tokenizer, a_prompt(20), max_tokens=3)
        undone()
        with pytest.raises(ZeroDivisionError), attached(model, *arguments):
            batch_generate(model, tokenizer, [a_prompt(20), a_prompt(3)], max_tokens=3)
            raise ZeroDivisionError
        undone()


def test_attached_is_undone_after_an_error_inside_mlx_lm(model: Any, tokenizer: Any, undone: Any) -> None:
    def broken(_: mx.array, logits: mx.array) -> mx.array:
        raise ZeroDivisionError

    for run in (
        lambda: mlx_lm.generate(model, tokenizer, a_prompt(20), logits_processors=[broken]),
        lambda: batch_generate(model, tokenizer, [a_prompt(20)], logits_processors=[broken]),
    ):
        with pytest.raises(ZeroDivisionError), attached(model, H2O(), 14):
            run()
        undone()
    for bad in ((H2O(), 0), (H2O(), None), (H2O(), 14, "half"), ("h2o", 14), (None, 14)):
        with pytest.raises(ValueError, match=r"expected|need"), attached(model, *bad):
            raise AssertionError("entered")
        undone()


def test_attached_is_undone_under_a_generator_that_was_left(model: Any, tokenizer: Any, undone: Any) -> None:
    with attached(model, H2O(), 14):
        left = stream_generate(model, tokenizer, a_prompt(20), max_tokens=30)
        next(left)
    undone()
    left.close()
    undone()


def test_attached_nests(model: Any, tokenizer: Any, undone: Any) -> None:
    def made() -> list[Any]:
        return [
            (c.policy, c.budget) if isinstance(c, KeyformerKVCache) else type(c)
            for c in mlx_cache.make_prompt_cache(model)
        ]

    plain, outer, inner = [KVCache] * 2, [(H2O(), 14)] * 2, [(Window(), 9)] * 2
    assert made() == plain
    with attached(model, H2O(), 14):
        assert made() == outer
        first = mlx_lm.generate(model, tokenizer, a_prompt(40), max_tokens=9)
        with attached(model, Window(), 9):
            assert made() == inner
            assert mlx_lm.generate(model, tokenizer, a_prompt(40), max_tokens=9) != first
            with attached(model):
                assert made() == inner
        assert made() == outer
        with pytest.raises(ZeroDivisionError), attached(model, Window(), 9):
            raise ZeroDivisionError
        assert mlx_lm.generate(model, tokenizer, a_prompt(40), max_tokens=9) == first
    assert made() == plain


def test_blocks_on_one_model_may_end_in_any_order(model: Any, undone: Any) -> None:
    one, two = attached(model, H2O(), 14), attached(model, Window(), 9)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert [c.policy for c in mlx_cache.make_prompt_cache(model)] == [Window()] * 2
    two.__exit__(None, None, None)
    undone()


def test_threads_get_evicting_caches_whatever_the_others_do(model: Any, undone: Any) -> None:
    """Two threads that generate, and one that begins and ends blocks of its own."""
    found: Counter[type] = Counter()

    def make() -> None:
        for _ in range(60):
            found.update(type(c) for c in mlx_cache.make_prompt_cache(model))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with attached(model, H2O(), 14):
            threads = [threading.Thread(target=make) for _ in range(2)]
            for t in threads:
                t.start()
            for _ in range(10):
                with attached(model, Window(), 9):
                    pass
            for t in threads:
                t.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == {KeyformerKVCache: 2 * 2 * 60}


def test_two_models_each_with_its_own(model: Any, tokenizer: Any, undone: Any) -> None:
    other = tiny_llama(seed=5)
    before = everything_of_mlx_lm(other)

    def policies(m: Any) -> list[Any]:
        return [getattr(c, "policy", None) for c in mlx_cache.make_prompt_cache(m)]

    one, two = attached(model, H2O(), 14), attached(other, Window(), 9)
    one.__enter__()
    assert policies(other) == [None, None]
    two.__enter__()
    assert (policies(model), policies(other)) == ([H2O()] * 2, [Window()] * 2)
    caches = [mlx_cache.make_prompt_cache(m) for m in (model, other)]
    for m, c in zip((model, other), caches, strict=True):
        mlx_lm.generate(m, tokenizer, a_prompt(30), max_tokens=5, prompt_cache=c)
    assert [c[0].size() for c in caches] == [14, 9]
    one.__exit__(None, None, None)  # in the order they came, too
    assert (policies(model), policies(other)) == ([None] * 2, [Window()] * 2)
    mlx_lm.generate(other, tokenizer, a_prompt(30), max_tokens=5)
    two.__exit__(None, None, None)
    assert policies(other) == [None, None]
    after = everything_of_mlx_lm(other)
    assert [key for key, value in before.items() if after[key] is not value] == []
