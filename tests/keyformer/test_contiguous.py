"""Contiguous positions: the rows that are kept count 0..n-1, whatever was evicted between them; new tokens go on at n.

The oracle is written from the specification in float64: it keeps un-rotated rows, turns each to its number for every
call, and evicts by the masses of that call.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache
from small import KINDS, Stream, a_policy, feed, kept_positions, kept_scores, step, tiny_llama, tokens
from test_rope import FALCON_H1, GPT2, LINEAR_ATTENTION, MINICPM3, MLA, SCALED, tiny, turned

from keyformer import H2O, Full, KeyformerKVCache, Policy, Streaming, attached, make_prompt_cache
from keyformer.hook import leaves
from keyformer.rope import Rope, wavelengths

# -- the oracle --------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    arrival: int
    key: np.ndarray  # not rotated
    value: np.ndarray
    score: float = 0.0


@dataclass
class Exact:
    """One sequence of one layer. `kind`: streaming, h2o, or the key proxy without noise."""

    kind: str
    budget: int
    n_sink: int
    recent: int
    rope: Rope
    prefill: str
    heads: list[list[Row]]
    seen: int = 0
    unwalked: int = 0  # new rows whose keys have not scored the others yet
    gap: float = math.inf  # the closest decision so far

    def call(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, decoding: bool) -> np.ndarray:
        """New tokens q [Hq, S, D], k [Hkv, S, D], v [Hkv, S, Dv]; the attention's output [Hq, S, Dv]."""
        S, group = k.shape[1], len(q) // len(k)
        out = np.empty((len(q), S, v.shape[2]))
        for h, rows in enumerate(self.heads):
            n = len(rows)
            rows += [Row(self.seen + s, k[h, s], v[h, s]) for s in range(S)]
            keys, values = self.numbered(h), np.array([r.value for r in rows])
            for g in range(h * group, (h + 1) * group):
                logits = turned(q[g], np.arange(n, n + S), self.rope) @ keys.T / math.sqrt(k.shape[2])
                logits[np.arange(n + S) > n + np.arange(S)[:, None]] = -np.inf
                mass = softmax(logits)
                out[g] = mass @ values
                if self.kind == "h2o":
                    for row, m in zip(rows, mass.sum(axis=0), strict=True):
                        row.score += m
        self.seen += S
        self.unwalked += S
        if decoding or self.prefill == "chunked":
            self.evict()
        return out

    def numbered(self, h: int) -> np.ndarray:
        """The keys of one head, each turned to its number."""
        rows = self.heads[h]
        return turned(np.array([r.key for r in rows]), np.arange(len(rows)), self.rope)

    def evict(self) -> None:
        for h, rows in enumerate(self.heads):
            if self.kind == "proxy without noise":
                keys = dict(zip([r.arrival for r in rows], self.numbered(h), strict=True))
                rows, new = rows[: len(rows) - self.unwalked], rows[len(rows) - self.unwalked :]
                for row in new:
                    if rows:
                        stored = np.array([keys[r.arrival] for r in rows])
                        mass = softmax(stored @ keys[row.arrival] / math.sqrt(len(row.key)))
                        for r, m in zip(rows, mass, strict=True):
                            r.score += m
                    row.score = 0.0 if row.arrival else 1.0
                    rows = self.without_lowest([*rows, row], row.arrival + 1)
            while len(rows) > self.budget:
                rows = self.without_lowest(rows, self.seen)
            self.heads[h] = rows
        self.unwalked = 0

    def without_lowest(self, rows: list[Row], seen: int) -> list[Row]:
        if len(rows) <= self.budget:
            return rows
        open_rows = [r for r in rows if self.n_sink <= r.arrival < seen - self.recent]
        first, *others = sorted(open_rows, key=lambda r: (r.score, r.arrival))
        if others and self.kind != "streaming":
            self.gap = min(self.gap, others[0].score - first.score)
        return [r for r in rows if r is not first]


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


# -- one layer, called as a model calls it -----------------------------------------------------------------------------

HEADS, KV_HEADS = 4, 2


@dataclass
class Line:
    """A sequence: its un-rotated stream, how far it is, and the oracle beside it."""

    stream: Stream
    exact: Exact
    at: int = 0
    last: np.ndarray = field(default_factory=lambda: np.empty(0))

    def new(self, S: int, offset: int, decoding: bool) -> tuple[mx.array, mx.array, mx.array]:
        """The next S tokens, rotated to `offset` and on; the oracle takes them too."""
        assert {offset} == {len(rows) for rows in self.exact.heads}
        q, k, v = self.stream.numpy(self.at, self.at + S)
        self.at += S
        self.last = self.exact.call(q, k, v, decoding)
        places = np.arange(offset, offset + S)
        rotated = (turned(x, np.broadcast_to(places, x.shape[:2]), self.exact.rope) for x in (q, k))
        q32, k32 = (mx.array(x[None].astype(np.float32)) for x in rotated)
        return q32, k32, mx.array(v[None])

    def check_rows(self, keys: mx.array, values: mx.array) -> None:
        """Returned rows [Hkv, n, D]: each is the un-rotated key at its number in temporal order. Values tell which."""
        _, k, v = self.stream.numpy(0, self.at)
        for h in range(KV_HEADS):
            known = {row.tobytes(): i for i, row in enumerate(v[h])}
            arrivals = np.array([known[row.tobytes()] for row in np.array(values[h])])
            assert len(set(arrivals)) == len(arrivals)
            numbers = np.argsort(np.argsort(arrivals))
            np.testing.assert_allclose(keys[h], turned(k[h, arrivals], numbers, self.exact.rope), atol=3e-6)

    def check_out(self, out: mx.array) -> None:
        np.testing.assert_allclose(out, self.last, atol=1e-5)

    def check_kept(self, cache: KeyformerKVCache, b: int = 0) -> None:
        if self.exact.gap < 1e-6:
            reject()  # float32 may decide otherwise
        assert kept_positions(cache, b) == [[r.arrival for r in rows] for rows in self.exact.heads]
        if self.exact.kind != "streaming":
            exact = [[r.score for r in rows] for rows in self.exact.heads]
            np.testing.assert_allclose(kept_scores(cache, b), exact, rtol=1e-5, atol=1e-5)
        assert cache.sizes()[b] == len(self.exact.heads[0])


def a_line(kind: str, policy: Policy, budget: int, prefill: str, rope: Rope, size: int, n: int, seed: int = 0) -> Line:
    recent = policy.recent_rows(budget)
    exact = Exact(kind, budget, policy.n_sink, recent, rope, prefill, [[] for _ in range(KV_HEADS)])
    return Line(Stream.random(seed, n, HEADS, KV_HEADS, size, 5), exact)


def call(cache: KeyformerKVCache, lines: list[Line], S: int, decoding: bool) -> None:
    """One call of the layer for all lines; after it rows, outputs and what was kept agree with the oracle."""
    mask = cache.make_mask(S)
    offsets = np.broadcast_to(np.array(cache.offset), len(lines)).tolist()
    made = [line.new(S, at, decoding) for line, at in zip(lines, offsets, strict=True)]
    q, k, v = (mx.concatenate(parts) for parts in zip(*made, strict=True))
    keys, values = cache.update_and_fetch(k, v)
    scale = 1 / math.sqrt(k.shape[3])
    out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)
    pending = cache.observe(q, keys, scale=scale, mask=mask)
    mx.eval(out, pending)
    for b, line in enumerate(lines):
        own = slice(None)
        if isinstance(mask, mx.array) and len(lines) > 1:
            own = np.flatnonzero(np.array(mask[b, 0, -1])).tolist()
        line.check_rows(mx.array(np.array(keys[b])[:, own]), mx.array(np.array(values[b])[:, own]))
        line.check_out(out[b])
        line.check_kept(cache, b)


ROPES = {
    "whole rows": (Rope(tuple(wavelengths(8, 100.0).tolist())), 8),
    "neighbours, odd size": (Rope(tuple(wavelengths(6, 10000.0).tolist()), True), 9),
    "backwards, one pair still": (Rope((-1.0, 7.5, math.inf)), 6),
    "no rotation": (Rope(()), 6),
}
RANKS = ("streaming", "h2o", "proxy without noise")


def a_rank(kind: str, n_sink: int, recent: int) -> Policy:
    return Streaming(n_sink=n_sink, recent=recent) if kind == "streaming" else a_policy(kind, n_sink, recent)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(RANKS),
    prefill=st.sampled_from(["full", "chunked"]),
    rope=st.sampled_from(list(ROPES)),
    n_sink=st.integers(0, 2),
    recent=st.integers(0, 3),
    room=st.integers(0, 8),
    turns=st.lists(
        st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 8)), min_size=1, max_size=2
    ),
    seed=st.integers(0, 999),
)
def test_returned_rows_are_unrotated_keys_at_their_numbers(
    kind: str,
    prefill: str,
    rope: str,
    n_sink: int,
    recent: int,
    room: int,
    turns: list[tuple[list[int], int]],
    seed: int,
) -> None:
    """Chunked prompts and decoding, twice, against the oracle after every call."""
    policy = a_rank(kind, n_sink, recent)
    budget = policy.least_budget() + room
    turn, size = ROPES[rope]
    n = sum(sum(chunks) + steps for chunks, steps in turns)
    line = a_line(kind, policy, budget, prefill, turn, size, n, seed)
    cache = KeyformerKVCache(policy, budget, prefill=prefill, rope=turn)
    for chunks, steps in turns:
        cache.begin_prefill()
        for S in chunks:
            call(cache, [line], S, decoding=False)
        cache.end_prefill()
        line.exact.evict()
        line.check_kept(cache)
        for _ in range(steps):
            call(cache, [line], 1, decoding=True)
    assert cache.offset == cache.size() == len(line.exact.heads[0])


def test_chunked_prompts_need_no_announcement() -> None:
    policy, (rope, size) = a_rank("h2o", 1, 2), ROPES["whole rows"]
    line = a_line("h2o", policy, 6, "chunked", rope, size, 40)
    cache = KeyformerKVCache(policy, 6, prefill="chunked", rope=rope)
    for S in (9, 4, 8):
        call(cache, [line], S, decoding=False)
    for _ in range(9):
        call(cache, [line], 1, decoding=True)
    call(cache, [line], 5, decoding=False)
    call(cache, [line], 1, decoding=True)


def test_a_full_prompt_that_nobody_ends_is_refused() -> None:
    """The last prompt token was rotated at a number that the selection would change."""
    model = tiny_llama()
    caches = make_prompt_cache(model, Streaming(recent=2), 8, positions="contiguous")
    model(tokens(20)[None], cache=caches)
    with pytest.raises(RuntimeError, match=r"end_prefill\(\) before the first decoded token.*attached"):
        step(model, caches, 1)
    short = make_prompt_cache(model, Streaming(recent=2), 8, positions="contiguous")
    model(tokens(5)[None], cache=short)  # nothing to evict: nothing changes number
    assert [c.offset for c in short] == [5, 5]
    step(model, short, 1)


# -- several sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RANKS)
@pytest.mark.parametrize("prefill", ["full", "chunked"])
def test_sequences_of_different_lengths(kind: str, prefill: str) -> None:
    """Merged after prompts below, at and above the budget; filtered, extended, and one taken out again."""
    policy, (rope, size) = a_rank(kind, 1, 2), ROPES["whole rows"]
    lines = [a_line(kind, policy, 7, prefill, rope, size, 60, seed) for seed in range(4)]
    caches = []
    for line, prompt in zip(lines, (3, 7, 23, 12), strict=True):
        caches.append(KeyformerKVCache(policy, 7, prefill=prefill, rope=rope))
        caches[-1].begin_prefill()
        call(caches[-1], [line], prompt - 1, decoding=False)
        call(caches[-1], [line], 1, decoding=False)
        caches[-1].end_prefill()
        line.exact.evict()
    batch = KeyformerKVCache.merge(caches[:3])
    assert batch.offset.tolist() == [3, 7, 7]
    for _ in range(3):
        call(batch, lines[:3], 1, decoding=True)
    batch.filter([2, 0])
    batch.extend(KeyformerKVCache.merge(caches[3:]))
    together = [lines[2], lines[0], lines[3]]
    for _ in range(6):
        call(batch, together, 1, decoding=True)
    assert batch.offset.tolist() == [7, 7, 7]
    alone = batch.extract(1)
    for _ in range(3):
        call(alone, [lines[0]], 1, decoding=True)
    call(alone, [lines[0]], 4, decoding=False)


@pytest.mark.parametrize("kind", RANKS)
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padded_prompts_of_a_batch(kind: str, padding: str) -> None:
    """Padding takes no number: the rows of each sequence are those it has alone."""
    policy, (rope, size) = a_rank(kind, 1, 2), ROPES["whole rows"]
    lengths, width = [5, 14, 9], 14
    streams = [a_line(kind, policy, 6, "full", rope, size, 40, seed) for seed in range(3)]
    batch = KeyformerKVCache.merge([KeyformerKVCache(policy, 6, rope=rope) for _ in lengths])
    batch.begin_prefill()
    pads = [width - n for n in lengths]
    if padding == "left":
        batch.prepare(left_padding=pads)
    else:
        batch.prepare(lengths=lengths, right_padding=pads)
    for first, last in ((0, 6), (6, 14)):
        mask, offsets = batch.make_mask(last - first), batch.offset.tolist()
        made = []
        for line, n, pad, offset in zip(streams, lengths, pads, offsets, strict=True):
            columns = np.arange(first, last) - (pad if padding == "left" else 0)
            real = (columns >= 0) & (columns < n)
            # a model rotates column j at offset + j, padding or not
            assert (offset + np.arange(last - first))[real].tolist() == columns[real].tolist()
            parts = [np.full((len(a), last - first, a.shape[2]), 1e3, np.float32) for a in line.stream.numpy(0, 0)]
            if real.any():
                for part, a in zip(parts, line.new(int(real.sum()), int(columns[real][0]), False), strict=True):
                    part[:, real] = np.array(a[0])
            made.append([mx.array(part[None]) for part in parts])
        q, k, v = (mx.concatenate(parts) for parts in zip(*made, strict=True))
        keys, values = batch.update_and_fetch(k, v)
        scale = 1 / math.sqrt(size)
        out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)
        mx.eval(out, batch.observe(q, keys, scale=scale, mask=mask))
    batch.finalize()
    batch.end_prefill()
    for b, line in enumerate(streams):
        line.exact.evict()
        assert batch.kept(b).tolist() == [[r.arrival for r in rows] for rows in line.exact.heads]
    assert batch.offset.tolist() == [5, 6, 6]
    for _ in range(4):
        call(batch, streams, 1, decoding=True)


# -- a model -----------------------------------------------------------------------------------------------------------


def watch(cache: KeyformerKVCache) -> None:
    """Every call of `cache` from here on is checked: returned rows are un-rotated keys at their numbers.

    The un-rotated key is what came in, turned back in float64; values tell rows apart.
    """
    came: dict[tuple[int, bytes], tuple[int, np.ndarray]] = {}
    assert cache.rope is not None
    rope, update = cache.rope, cache.update_and_fetch

    def watched(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        offset = cache.offset
        k, v = (np.array(a[0].astype(mx.float32)) for a in (keys, values))
        for h in range(len(k)):
            back = turned(k[h], -np.arange(offset, offset + k.shape[1]), rope)
            for row, value in zip(back, v[h], strict=True):
                assert (h, value.tobytes()) not in came
                came[h, value.tobytes()] = len(came), row
        fetched = update(keys, values)
        k, v = (np.array(a[0].astype(mx.float32)) for a in fetched)
        eps = 1e-5 if keys.dtype == mx.float32 else 4 * mx.finfo(keys.dtype).eps
        for h in range(len(k)):
            arrivals, rows = zip(*[came[h, value.tobytes()] for value in v[h]], strict=True)
            exact = turned(np.array(rows), np.argsort(np.argsort(arrivals)), rope)
            np.testing.assert_allclose(k[h], exact, atol=eps * np.abs(exact).max())
        return fetched

    cache.update_and_fetch = watched  # type: ignore[method-assign]


def different_tokens(n: int) -> mx.array:
    return mx.array(np.random.default_rng(0).permutation(300)[:n])


MODELS = {
    "llama3 scaling": lambda: tiny_llama(rope_scaling=SCALED["llama3"]),
    "yarn, scaled rows": lambda: tiny_llama(rope_scaling=SCALED["yarn"]),
    "bfloat16": lambda: tiny_llama(mx.bfloat16),
    "float16": lambda: tiny_llama(mx.float16),
    "half of the row turns": lambda: tiny("phi3"),
    "neighbours": lambda: tiny("glm"),
    "backwards": lambda: tiny("talkie"),
    "layers without rotation": lambda: tiny("smollm3"),
    "sliding layers": lambda: tiny("gemma3_text", rope_local_base_freq=10000.0, rope_theta=1e6),
    "half of the layers": lambda: tiny("qwen3_next", **LINEAR_ATTENTION),
    "caches inside lists": lambda: tiny("falcon_h1", **FALCON_H1),
}


@pytest.mark.parametrize("prefill", ["full", "chunked"])
@pytest.mark.parametrize("name", MODELS)
def test_models_get_rows_at_their_numbers(name: str, prefill: str) -> None:
    model = MODELS[name]()
    caches = make_prompt_cache(model, H2O(n_sink=1, recent=3), 9, prefill, positions="contiguous")
    ours = [c for c in leaves(caches) if isinstance(c, KeyformerKVCache)]
    text = different_tokens(60)
    with attached(model):
        for c in ours:
            watch(c)
            c.begin_prefill()
        for first in range(0, 31, 8):
            mx.eval(model(text[None, first : min(first + 8, 31)], cache=caches))
        for c in ours:
            c.end_prefill()
        for token in text[31:].tolist():
            assert [c.offset for c in ours] == [9] * len(ours)
            step(model, caches, token)


def test_streaming_is_streaming_llm() -> None:
    """The keys of a single layer depend on its tokens only: a step is the model on sinks, last tokens and this one."""
    model = tiny_llama(num_hidden_layers=1)
    text = tokens(40).tolist()
    caches = make_prompt_cache(model, Streaming(), 10, positions="contiguous")
    feed(model, caches, mx.array(text[:20]), 7)
    for i in range(20, 40):
        ours = step(model, caches, text[i])
        kept = text[:4] + text[i - 6 : i]
        np.testing.assert_allclose(ours, model(mx.array([[*kept, text[i]]]))[:, -1], atol=2e-5)
    original = make_prompt_cache(model, Streaming(), 10)
    feed(model, original, mx.array(text[:20]), 7)
    for i in range(20, 40):
        theirs = step(model, original, text[i])
    assert kept_positions(original[0]) == kept_positions(caches[0])
    assert mx.abs(theirs - ours).max() > 1e-3  # and the numbers matter


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefill", ["full", "chunked"])
def test_full_budget_is_bit_for_bit_the_original(kind: str, prefill: str) -> None:
    model = tiny_llama(mx.bfloat16)
    logits = []
    for positions in ("original", "contiguous"):
        caches = make_prompt_cache(model, a_policy(kind), 64, prefill, positions=positions)
        with attached(model):
            parts = [feed(model, caches, tokens(30), 11)]
            parts += [step(model, caches, t) for t in tokens(20, seed=1).tolist()]
        logits.append(mx.stack(parts))
        assert [c.offset for c in caches] == [50, 50]
    assert mx.array_equal(*logits)


def test_the_chunks_of_a_full_prompt_do_not_matter() -> None:
    model = tiny_llama()
    results = []
    for chunk in (1, 5, 40):
        caches = make_prompt_cache(model, H2O(), 12, positions="contiguous")
        with attached(model):
            feed(model, caches, tokens(40), chunk)
            logits = [step(model, caches, t) for t in tokens(8, seed=1).tolist()]
        results.append((mx.stack(logits), [kept_positions(c) for c in caches]))
    for logits, kept in results[1:]:
        assert kept == results[0][1]
        np.testing.assert_allclose(logits, results[0][0], atol=1e-4)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_thousand_steps_round_once(dtype: mx.Dtype) -> None:
    """A row is turned from the one that came, never from what it was turned to, whatever numbers it fell through."""
    rope, size = Rope(tuple(wavelengths(8, 10000.0).tolist())), 8
    policy = Streaming(n_sink=0, recent=0)
    cache = KeyformerKVCache(policy, 950, prefill="chunked", rope=rope)
    rng = np.random.default_rng(0)
    plain = rng.normal(size=(1, 1, 2000, size))

    def rows(first: int, last: int, offset: int) -> mx.array:
        at = np.arange(offset, offset + last - first)[None, None]
        return mx.array(turned(plain[:, :, first:last], at, rope).astype(np.float32)).astype(dtype)

    fetched, values = cache.update_and_fetch(rows(0, 951, 0), mx.zeros((1, 1, 951, 1)))
    for i in range(951, 1900):
        mx.eval(fetched, values)
        fetched, values = cache.update_and_fetch(rows(i, i + 1, 950), mx.zeros((1, 1, 1, 1)))
    order = mx.argsort(cache.positions[0, 0, :951])
    got = np.array(fetched[0, 0][order].astype(mx.float32))
    exact = turned(plain[0, 0, 949:1900], np.arange(951), rope)
    # one rounding on arrival, one when it is returned
    assert np.abs(got - exact).max() <= 2 * mx.finfo(dtype).eps * np.abs(exact).max()


# -- elsewhere ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["file", "deepcopy", "state"])
@pytest.mark.parametrize("kind", ["streaming", "h2o", "keyformer_proxy"])
@pytest.mark.parametrize("steps", [0, 5])
def test_a_stored_cache_goes_on_the_same(way: str, kind: str, steps: int, tmp_path: Path) -> None:
    model = tiny_llama()
    policy = Streaming(recent=2) if kind == "streaming" else a_policy(kind, 1, 3)
    caches = make_prompt_cache(model, policy, 9, positions="contiguous")
    with attached(model):
        feed(model, caches, tokens(30), 8)
        for t in tokens(steps, seed=1).tolist():
            step(model, caches, t)
        if way == "file":
            save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
            again = load_prompt_cache(str(tmp_path / "cache.safetensors"))
        elif way == "deepcopy":
            again = copy.deepcopy(caches)
        else:
            again = [type(c).from_state(c.state) for c in caches]
        assert [c.offset for c in again] == [9, 9] and [c.rope for c in again] == [c.rope for c in caches]
        for t in tokens(12, seed=2).tolist():
            # rows in another order: the sums of attention may round differently
            np.testing.assert_allclose(step(model, again, t), step(model, caches, t), atol=1e-5)
        assert [kept_positions(c) for c in again] == [kept_positions(c) for c in caches]


def test_mlx_lm_generates_with_contiguous_positions() -> None:
    """generate_step under `attached` is the prompt, its end and single steps."""
    model = tiny_llama()
    with attached(model, H2O(), 10, positions="contiguous"):
        generated = [int(t) for t, _ in generate_step(tokens(33), model, max_tokens=12, prefill_step_size=8)]
    caches = make_prompt_cache(model, H2O(), 10, positions="contiguous")
    with attached(model):
        feed(model, caches, tokens(33)[:-1], 8)
        logits, ours = step(model, caches, int(tokens(33)[-1])), []
        for _ in range(12):
            ours.append(int(mx.argmax(logits)))
            logits = step(model, caches, ours[-1])
    assert generated == ours


@pytest.mark.parametrize("prefill", ["full", "chunked"])
@pytest.mark.parametrize("rows_at_once", [2, 8])
def test_mlx_lm_generates_batches_with_contiguous_positions(rows_at_once: int, prefill: str) -> None:
    """Prompts of different lengths, more than fit at once: each as it goes alone, kept rows too."""
    model, lengths, answers = tiny_llama(), (3, 40, 17, 11, 29), (9, 4, 12, 6, 2)
    prompts = [tokens(n, seed=n).tolist() for n in lengths]
    with attached(model, H2O(), 10, prefill, positions="contiguous"):
        batch = BatchGenerator(
            model, prefill_batch_size=rows_at_once, completion_batch_size=rows_at_once, prefill_step_size=8
        )
        found: dict[int, list[int]] = {uid: [] for uid in batch.insert(prompts, list(answers))}
        caches: dict[int, list[KeyformerKVCache]] = {}
        while len(caches) < len(prompts):
            for response in batch.next()[1]:
                found[response.uid].append(response.token)
                if response.finish_reason is not None:
                    caches[response.uid] = response.prompt_cache
        batch.close()
        for uid, prompt, count in zip(found, prompts, answers, strict=True):
            own = model.make_cache()
            steps = generate_step(mx.array(prompt), model, max_tokens=count, prefill_step_size=8, prompt_cache=own)
            assert [int(t) for t, _ in steps] == found[uid]
            assert [c.kept().tolist() for c in own] == [c.kept().tolist() for c in caches[uid]]
            assert [c.offset for c in own] == [c.offset for c in caches[uid]]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tiny("deepseek_v3", **MLA), "deepseek_v3.*MLA"),
        (lambda: tiny("minicpm3", **MINICPM3), "minicpm3.*MLA"),
        (lambda: tiny("gpt2", **GPT2), "gpt2.*learned positions"),
        (lambda: tiny("llama", rope_scaling={"type": "dynamic", "factor": 2.0}), "DynamicNTKScalingRoPE"),
    ],
)
def test_models_whose_keys_cannot_be_turned_are_refused(build: Any, message: str) -> None:
    model = build()
    with pytest.raises(ValueError, match=message):
        make_prompt_cache(model, Streaming(), 16, positions="contiguous")
    with pytest.raises(ValueError, match=message), attached(model, Streaming(), 16, positions="contiguous"):
        pass
    assert make_prompt_cache(model, Streaming(), 16)


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="positions: expected 'original' or 'contiguous', got 'new'"):
        make_prompt_cache(tiny_llama(), Full(), positions="new")
