"""The cache, one layer at a time, against the float64 oracle: every policy, prefill, chunking, turn and batch."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import Layer, layer_of
from small import KINDS, Stream, a_policy, alone, attend, kept, kept_positions, kept_scores, policies_and_budgets

from keyformer import KeyformerKVCache, KeyformerProxy, Policy


def compare(cache: KeyformerKVCache, one: Layer, b: int = 0) -> None:
    """The same rows kept, with the same scores."""
    heads = range(one.kv_heads)
    assert cache.sizes()[b] == len(one.positions(0))
    if not one.positions(0):
        return
    assert kept_positions(cache, b) == [one.positions(h) for h in heads]
    assert cache.kept(b).tolist() == [one.positions(h) for h in heads]
    if one.attention == "none" or any(one.waiting):
        return
    for h, scores in enumerate(kept_scores(cache, b)):
        np.testing.assert_allclose(scores, one.scores(h), atol=3e-5)


def rows_are_bit_exact(cache: KeyformerKVCache, stream: Stream, b: int = 0) -> None:
    cache, b = alone(cache, b)
    assert cache.keys is not None
    assert cache.values is not None
    for ours, original in ((cache.keys, stream.k), (cache.values, stream.v)):
        assert ours.dtype == original.dtype
        for h, head in enumerate(kept(cache, b)):
            at, from_ = mx.array([i for _, i in head]), mx.array([p for p, _ in head])
            assert mx.array_equal(ours[b, h][at], original[0, h][from_], equal_nan=True)


@st.composite
def conversations(draw: st.DrawFn) -> dict[str, Any]:
    policy, budget = draw(policies_and_budgets())
    kv_heads, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3]))
    turns = []
    for turn in range(draw(st.integers(1, 2))):
        announced = draw(st.booleans())
        n = draw(st.integers(1 if announced or not turn else 2, 24))
        chunks: list[int] = []
        while sum(chunks) < n:
            rest = n - sum(chunks)
            # unannounced, a one-token chunk after the first counts as decoding
            least = 1 if announced or (not turn and not chunks) else min(2, rest)
            chunks.append(draw(st.integers(least, rest)))
        if not announced and (1 in chunks[1:] or (turn and 1 in chunks)):
            chunks = [n]
        turns.append({"announced": announced, "chunks": chunks, "decode": draw(st.integers(0 if announced else 1, 12))})
    n = sum(sum(t["chunks"]) + t["decode"] for t in turns)
    sizes = draw(st.sampled_from([(4, 4), (7, 5), (8, 3)]))
    stream = Stream.random(draw(st.integers(0, 2**32)), n, kv_heads * group, kv_heads, *sizes)
    bad = draw(st.sampled_from([0, 0, 0, 1, 2]))
    for _ in range(bad):
        at = draw(st.integers(0, kv_heads - 1)), draw(st.integers(0, n - 1))
        stream.k[0, at[0], at[1], 0] = draw(st.sampled_from([math.nan, math.inf]))
    return {
        "policy": policy,
        "budget": budget,
        "prefill": draw(st.sampled_from(["full", "chunked"])),
        "layer": draw(st.integers(0, 3)),
        "turns": turns,
        "stream": stream,
        "kv_heads": kv_heads,
        "bad": bool(bad),
        "score_bytes": draw(st.sampled_from([1, 500, 1 << 28])),
    }


@settings(max_examples=150, deadline=None, derandomize=True)
@given(conversations())
def test_conversations(c: dict[str, Any]) -> None:
    """One or two turns of prompt and decoding; after every call output, rows and scores agree."""
    policy: Policy = c["policy"]
    stream: Stream = c["stream"]
    cache = KeyformerKVCache(policy, c["budget"], c["layer"], c["prefill"], c["score_bytes"])
    one = layer_of(
        policy, c["kv_heads"], c["budget"] if policy.evicts else None, layer=c["layer"], prefill=c["prefill"]
    )
    at = 0

    def call(S: int, decode: bool) -> None:
        nonlocal at
        got = attend(cache, *stream.part(at, at + S), stream.scale)
        expected = (one.decode if decode else one.prompt)(*stream.numpy(at, at + S), stream.scale)
        at += S
        assume(one.margin > 1e-5)
        if not c["bad"]:
            np.testing.assert_allclose(np.array(got[0]), expected, atol=1e-5)
        assert cache.offset == one.offset == at
        compare(cache, one)

    for turn in c["turns"]:
        if turn["announced"]:
            cache.begin_prefill()
        for S in turn["chunks"]:
            call(S, decode=False)
            if c["prefill"] == "chunked" and policy.evicts:
                assert cache.size() <= c["budget"]
        one.end_prefill()
        if turn["announced"]:
            cache.end_prefill()
            assume(one.margin > 1e-5)
            compare(cache, one)
        for _ in range(turn["decode"]):
            call(1, decode=True)
            if policy.evicts:
                assert cache.size() <= c["budget"]
                assert cache.slots()[0] <= c["budget"] + 1
    if cache.size():
        rows_are_bit_exact(cache, stream)
        assert cache.keys is not None
        assert [len(set(head)) for head in kept_positions(cache)] == [cache.size()] * c["kv_heads"]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_batches(data: st.DataObject) -> None:
    """Merged sequences of different lengths and budgets, one leaving: each row is the sequence it would be alone."""
    policy, _ = data.draw(policies_and_budgets())
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 2, 3]))
    sequences = []
    for _ in range(data.draw(st.integers(1, 4))):
        n = data.draw(st.integers(1, 20))
        budget = policy.least_budget() + data.draw(st.integers(0, 16))
        stream = Stream.random(data.draw(st.integers(0, 2**32)), n + 14, kv_heads * group, kv_heads, 7, 5)
        cache = KeyformerKVCache(policy, budget, 1)
        one = layer_of(policy, kv_heads, budget if policy.evicts else None, layer=1)
        attend(cache, *stream.part(0, n), stream.scale)
        one.prompt(*stream.numpy(0, n), stream.scale)
        cache.end_prefill()
        one.end_prefill()
        alone = data.draw(st.sampled_from([0, 0, 3]))
        for at in range(n, n + alone):  # decoded before the merge: the temperature is then not the same for all
            attend(cache, *stream.part(at, at + 1), stream.scale)
            one.decode(*stream.numpy(at, at + 1), stream.scale)
        sequences.append((n + alone, stream, cache, one))
    batch = KeyformerKVCache.merge([s[2] for s in sequences])
    live = list(range(len(sequences)))
    ended = [sequences[i][0] for i in live]
    for fed in range(10):
        if fed in (3, 6):
            stay = data.draw(st.permutations(live))[: data.draw(st.integers(1, len(live)))]
            batch.filter([live.index(i) for i in stay])
            live = stay
        parts = [sequences[i][1].part(ended[i] + fed, ended[i] + fed + 1) for i in live]
        q, k, v = (mx.concatenate(list(a)) for a in zip(*parts, strict=True))
        got = attend(batch, q, k, v, sequences[0][1].scale)
        assert np.array(batch.offset).tolist() == [ended[i] + fed + 1 for i in live]
        for b, i in enumerate(live):
            _, stream, _, one = sequences[i]
            expected = one.decode(*stream.numpy(ended[i] + fed, ended[i] + fed + 1), stream.scale)
            assume(one.margin > 1e-5)
            np.testing.assert_allclose(np.array(got[b]), expected, atol=1e-5)
            compare(batch, one, b)
            rows_are_bit_exact(batch, stream, b)


def chunked(draw: st.DrawFn, n: int) -> list[int]:
    """n in parts."""
    chunks: list[int] = []
    while sum(chunks) < n:
        chunks.append(draw(st.integers(1, n - sum(chunks))))
    return chunks


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.data())
def test_padded_prompts(data: st.DataObject) -> None:
    """Prompts of different lengths, padded left or right, chunk by chunk; then decoded, joined by others, taken apart.

    Padding holds large numbers that no row may become. After every call each sequence is what it would be alone.
    """
    policy, _ = data.draw(policies_and_budgets())
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 2, 3]))
    prefill = data.draw(st.sampled_from(["full", "chunked"]))
    announced = data.draw(st.booleans())

    def sequence(n: int) -> tuple[Stream, KeyformerKVCache, Layer]:
        budget = policy.least_budget() + data.draw(st.integers(0, 16))
        stream = Stream.random(data.draw(st.integers(0, 2**32)), n + 20, kv_heads * group, kv_heads, 7, 5)
        one = layer_of(policy, kv_heads, budget if policy.evicts else None, layer=1, prefill=prefill)
        return stream, KeyformerKVCache(policy, budget, 1, prefill), one

    lengths = data.draw(st.lists(st.integers(0, 14), min_size=1, max_size=4))
    announced = announced or not any(lengths)  # unannounced, the first token of all is a prompt
    longest = max(2, *lengths)
    sequences = [sequence(n) for n in lengths]
    scale = sequences[0][0].scale
    batch = KeyformerKVCache.merge([c for _, c, _ in sequences])
    left = data.draw(st.booleans())
    pads = [longest - n for n in lengths]
    if announced:
        batch.begin_prefill()
    if left:
        batch.prepare(left_padding=pads)
    elif any(pads):
        batch.prepare(lengths=lengths, right_padding=pads)

    def padded(stream: Stream, n: int, pad: int) -> list[mx.array]:
        rows = []
        for a in stream.part(0, n):
            around = mx.full((1, a.shape[1], pad, a.shape[3]), 1e4)
            rows.append(mx.concatenate([around, a] if left else [a, around], axis=2))
        return rows

    whole = [padded(s, n, pad) for (s, _, _), n, pad in zip(sequences, lengths, pads, strict=True)]
    q, k, v = (mx.concatenate(list(a)) for a in zip(*whole, strict=True))
    chunks = data.draw(st.composite(chunked)(longest))
    if not announced and (chunks[-1] == 1 or left):
        # nobody says that a last token alone still belongs to the prompt
        chunks = [longest]
    at = 0
    for S in chunks:
        columns = slice(at, at + S)
        got = attend(batch, q[:, :, columns], k[:, :, columns], v[:, :, columns], scale)
        for b, (stream, _, one) in enumerate(sequences):
            before = pads[b] if left else 0
            first, last = (min(max(i - before, 0), lengths[b]) for i in (at, at + S))
            if last > first:
                expected = one.prompt(*stream.numpy(first, last), scale)
                assume(one.margin > 1e-5)
                shown = np.array(got[b])[:, first + before - at : last + before - at]
                np.testing.assert_allclose(shown, expected, atol=1e-5)
            compare(batch, one, b)
        at += S
    batch.finalize()
    assert np.array(batch.offset).tolist() == lengths
    if announced:
        batch.end_prefill()
    for _, _, one in sequences:
        one.end_prefill()
    live, ended = list(range(len(sequences))), list(lengths)

    def decode(times: int) -> None:
        for _ in range(times):
            parts = [sequences[i][0].part(ended[i], ended[i] + 1) for i in live]
            q, k, v = (mx.concatenate(list(a)) for a in zip(*parts, strict=True))
            got = attend(batch, q, k, v, scale)
            for b, i in enumerate(live):
                stream, _, one = sequences[i]
                expected = one.decode(*stream.numpy(ended[i], ended[i] + 1), scale)
                assume(one.margin > 1e-5)
                np.testing.assert_allclose(np.array(got[b]), expected, atol=1e-5)
                ended[i] += 1
                compare(batch, one, b)
                rows_are_bit_exact(batch, stream, b)

    decode(4)
    later = sequence(3)
    attend(later[1], *later[0].part(0, 3), scale)
    later[2].prompt(*later[0].numpy(0, 3), scale)
    later[1].end_prefill()
    later[2].end_prefill()
    batch.extend(KeyformerKVCache.merge([later[1]]))
    sequences.append(later)
    live.append(len(sequences) - 1)
    ended.append(3)
    decode(3)
    b = data.draw(st.integers(0, len(live) - 1))
    out, i = batch.extract(b), live[b]
    for _ in range(3):  # goes on alone, the batch stays
        stream, _, one = sequences[i]
        got = attend(out, *stream.part(ended[i], ended[i] + 1), scale)
        np.testing.assert_allclose(
            np.array(got[0]), one.decode(*stream.numpy(ended[i], ended[i] + 1), scale), atol=1e-5
        )
        assume(one.margin > 1e-5)
        ended[i] += 1
        compare(out, one)
    live.remove(i)
    batch.filter([c for c in range(len(live) + 1) if c != b])
    if live:
        decode(3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_proxy_and_all_others_from_a_prompt_of_no_tokens(kind: str) -> None:
    """`end_prefill` of an empty cache: the first token is decoded already."""
    stream = Stream.random(3, 14, 4, 2, 8, 8)
    policy = a_policy(kind, 1, 2)
    cache, one = KeyformerKVCache(policy, 6), layer_of(policy, 2, 6 if policy.evicts else None)
    cache.begin_prefill()
    cache.end_prefill()
    one.end_prefill()
    for at in range(14):
        got = attend(cache, *stream.part(at, at + 1), stream.scale)
        np.testing.assert_allclose(np.array(got[0]), one.decode(*stream.numpy(at, at + 1), stream.scale), atol=1e-5)
        assert one.margin > 1e-5
        compare(cache, one)


def test_the_example_of_the_specification_through_the_cache() -> None:
    policy = a_policy("proxy without noise")
    for prompt in (1, 3, 5, 10):
        for prefill in ("full", "chunked"):
            cache = KeyformerKVCache(policy, 4, prefill=prefill)
            zeros = mx.zeros((1, 1, 10, 8))
            attend(cache, *[zeros[:, :, :prompt]] * 3, 1.0)
            cache.end_prefill()
            for at in range(prompt, 10):
                attend(cache, *[zeros[:, :, at : at + 1]] * 3, 1.0)
            assert kept_positions(cache) == [[0, 1, 2, 3]]
            assert kept_scores(cache)[0] == pytest.approx([13 / 3, 7 / 3, 11 / 6, 3 / 2], abs=1e-5)


def test_the_temperature_of_the_proxy_is_that_of_each_token() -> None:
    """A steep schedule and many heads, so that a temperature of one token earlier or later changes what is kept."""
    policy = KeyformerProxy(tau_init=0.0, tau_end=3.0, anneal_steps=12, n_sink=0, recent=0)
    for seed in range(12):
        stream = Stream.random(seed, 14, 8, 8, 4, 4)
        for prompt in (1, 6, 14):
            cache, one = KeyformerKVCache(policy, 3), layer_of(policy, 8, 3)
            attend(cache, *stream.part(0, prompt), stream.scale)
            one.prompt(*stream.numpy(0, prompt), stream.scale)
            cache.end_prefill()
            one.end_prefill()
            for at in range(prompt, 14):
                attend(cache, *stream.part(at, at + 1), stream.scale)
                one.decode(*stream.numpy(at, at + 1), stream.scale)
            assert one.margin > 1e-6
            compare(cache, one)
