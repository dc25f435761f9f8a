"""The functional API: the worked example, the float64 oracle, cutting into calls, bad keys and bad arguments."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from state_oracle import Head, rope

import keyformer
from keyformer import eviction, noise, state
from keyformer.eviction import on_cpu, walk_mlx, walk_numpy

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
RULE = {"n_sink": 0, "budget": 4, "recent": 0, "tau_init": 1.0, "tau_end": 1.0, "anneal_steps": 0, "rope_base": 1e4}
MODES = ["contiguous", "original"]


def rows(rng: np.random.Generator, *shape: int, dtype: mx.Dtype = mx.float32, scale: float = 1.0) -> mx.array:
    return mx.array((rng.normal(size=shape) * scale).astype(np.float32)).astype(dtype)


def f64(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32), np.float64)


def batched(keys: mx.array, values: mx.array, cuts: list[int], mode: str, seeds: list[int], **rule: Any) -> list[Any]:
    """All tokens through `keyformer_update_batched`, cut into calls."""
    out: list[Any] = [None, None, None, None, None, 0, 0]
    for first, last in zip([0, *cuts], [*cuts, keys.shape[1]], strict=True):
        new = keys[:, first:last], values[:, first:last]
        more = {**RULE, **rule}
        out = list(
            keyformer.keyformer_update_batched(
                *out[:5], *new, **more, next_pos=out[5], pos=out[6], seeds=seeds, position_mode=mode
            )
        )
    return out


def one_by_one(
    keys: mx.array, values: mx.array, cuts: list[int], mode: str, seeds: list[int], **rule: Any
) -> list[Any]:
    """The same through `keyformer_update`, head by head."""
    heads = []
    for h, seed in enumerate(seeds):
        s = keyformer.init_keyformer_state(head_dim=keys.shape[2], seed=seed, positions=mode, **{**RULE, **rule})
        for first, last in zip([0, *cuts], [*cuts, keys.shape[1]], strict=True):
            s = keyformer.keyformer_update(s, keys[h, first:last], values[h, first:last])
        heads.append(s)
    names = ("keys", "values", "scores", "gumbel", "positions")
    return [mx.stack([getattr(s, name) for s in heads]) for name in names] + [heads[0].next_pos, heads[0].pos]


# -- by hand -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", [batched, one_by_one])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cuts", [[], [1], [3, 4, 4, 7], list(range(1, 10))])
def test_the_example_of_the_specification(update: Any, mode: str, cuts: list[int]) -> None:
    zeros = mx.zeros((1, 10, 4))
    keys, _, scores, _, positions, next_pos, pos = update(zeros, zeros, cuts, mode, [0], tau_init=0.0, tau_end=0.0)
    assert positions.tolist() == [[0, 1, 2, 3]]
    assert scores[0].tolist() == pytest.approx([4.3333, 2.3333, 1.8333, 1.5], abs=1e-4)
    assert (next_pos, pos, keys.shape) == (10, 10, (1, 4, 4))


def test_a_new_row_goes_next_unless_it_is_recent() -> None:
    """Without noise a late token scores 0 and goes on arrival; `recent` keeps the last ones. Equal keys, by hand."""
    ones = mx.ones((1, 12, 2))
    kept = batched(ones, ones, [], "original", [0], tau_init=0.0, tau_end=0.0)[4]
    assert kept.tolist() == [[0, 1, 2, 3]]
    kept = batched(ones, ones, [], "original", [0], tau_init=0.0, tau_end=0.0, n_sink=1, recent=2)[4]
    assert kept[0, 0].item() == 0
    assert kept[0, 2:].tolist() == [10, 11]


# -- the oracle --------------------------------------------------------------------------------------------------------


@st.composite
def streams(draw: st.DrawFn) -> dict[str, Any]:
    mode = draw(st.sampled_from(MODES))
    # turned rows are rounded: at 16 bits a logit is only known to 1e-3, so there only "original" has an exact oracle
    dtype = draw(st.sampled_from(DTYPES)) if mode == "original" else mx.float32
    n_sink, recent = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    H, n = draw(st.integers(1, 3)), draw(st.integers(1, 28))
    D, Dv = draw(st.sampled_from([(4, 4), (7, 3), (2, 9), (16, 16)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    plain = f64(rows(rng, H, n, D, scale=draw(st.sampled_from([0.3, 1.0, 3.0]))))
    for i in draw(st.lists(st.integers(0, n - 1), max_size=3)):
        plain[i % H, i, :] = draw(st.sampled_from([np.nan, np.inf]))
    base = draw(st.sampled_from([100.0, 10000.0]))
    with np.errstate(invalid="ignore"):
        turned = np.array([[rope(x, p, base) for p, x in enumerate(head)] for head in plain])
    return {
        "plain": plain,
        "keys": mx.array(turned.astype(np.float32)).astype(dtype),
        "values": rows(rng, H, n, Dv, dtype=dtype),
        "mode": mode,
        "cuts": sorted(draw(st.lists(st.integers(0, n), max_size=4))),
        "seeds": draw(st.lists(st.integers(0, 2**64 - 1), min_size=H, max_size=H)),
        "rule": {
            "n_sink": n_sink,
            "budget": n_sink + recent + draw(st.integers(1, 7)),
            "recent": recent,
            "rope_base": base,
            **draw(
                st.sampled_from(
                    [
                        {},
                        {"tau_init": 0.0, "tau_end": 0.0},
                        {"tau_init": 2.0, "tau_end": 0.5},
                        {"tau_init": 0.0, "tau_end": 3.0, "anneal_steps": 9},
                    ]
                )
            ),
        },
    }


def oracles(c: dict[str, Any]) -> list[Head]:
    heads = []
    for h, seed in enumerate(c["seeds"]):
        one = Head(seed=seed, positions=c["mode"], storage=np.float32, **c["rule"])
        for plain, key, value in zip(c["plain"][h], f64(c["keys"][h]), f64(c["values"][h]), strict=True):
            one.insert(plain, key, value)
        heads.append(one)
    return heads


@settings(max_examples=150, deadline=None, derandomize=True)
@given(streams(), st.sampled_from([batched, one_by_one]))
def test_against_the_oracle_in_any_calls(c: dict[str, Any], update: Any) -> None:
    heads = oracles(c)
    assume(min(one.margin for one in heads) > 2e-5)
    for cuts in ([], c["cuts"]):
        keys, values, scores, gumbel, positions, next_pos, pos = update(
            c["keys"], c["values"], cuts, c["mode"], c["seeds"], **c["rule"]
        )
        assert next_pos == pos == c["keys"].shape[1]
        assert (keys.dtype, values.dtype) == (c["keys"].dtype, c["values"].dtype)
        assert (scores.dtype, gumbel.dtype, positions.dtype) == (mx.float32, mx.float32, mx.int32)
        for h, one in enumerate(heads):
            assert np.array_equal(f64(values[h]), np.array([r.value for r in one.rows]))  # the same rows, bit for bit
            assert positions[h].tolist() == [r.label for r in one.rows]
            np.testing.assert_allclose(scores[h], one.scores(), atol=2e-5)
            np.testing.assert_allclose(gumbel[h], [r.noise for r in one.rows], atol=1e-5)
            good = [i for i, r in enumerate(one.rows) if not r.bad]  # turning mixes NaN and infinity within a pair
            stored = np.array([r.key for r in one.rows])[good]
            np.testing.assert_allclose(f64(keys[h])[good], stored, atol=1e-5 if c["mode"] == "contiguous" else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_calls_and_heads_do_not_matter_over_several_blocks(mode: str, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(7)
    n = 300
    keys, values = rows(rng, 2, n, 8, dtype=dtype), rows(rng, 2, n, 5, dtype=dtype)
    rule = {"budget": 24, "n_sink": 2, "recent": 6, "tau_end": 2.0, "anneal_steps": 200}
    whole = batched(keys, values, [], mode, [3, 4], **rule)
    for update, cuts in (
        (batched, [1, 130, 290]),
        (batched, list(range(1, n))),
        (one_by_one, []),
        (one_by_one, [40, 41, 42, 299]),
    ):
        other = update(keys, values, cuts, mode, [3, 4], **rule)
        for a, b in zip(whole[:5], other[:5], strict=True):
            assert a.dtype == b.dtype
            if a.dtype == mx.float32 and a.ndim == 2:
                np.testing.assert_allclose(a, b, atol=1e-5)
            else:
                assert mx.array_equal(a, b)
        assert whole[5:] == other[5:]


@pytest.mark.parametrize("mode", MODES)
def test_a_new_row_that_one_head_keeps_and_another_frees(mode: str) -> None:
    """Nothing recent is protected: of three heads some free the new row, some one in the middle."""
    rng = np.random.default_rng(27)
    keys, values = rows(rng, 3, 40, 8), rows(rng, 3, 40, 5)
    rule = {"budget": 8, "tau_init": 3.0, "tau_end": 3.0}
    whole, single = (batched(keys, values, cuts, mode, [3, 4, 5], **rule) for cuts in ([], list(range(1, 40))))
    for name, a, b in zip(ARRAYS, whole, single, strict=False):
        np.testing.assert_allclose(a, b, atol=1e-5 if name in ("keys", "scores") else 0, err_msg=name)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_contiguous_rows_do_not_drift(dtype: mx.Dtype) -> None:
    """1200 calls of one token, most of which turn every kept row by -1: each is still its own key, rounded once."""
    rng = np.random.default_rng(1)
    n, D = 1200, 16
    plain = rng.normal(size=(1, n, D))
    exact = np.array([[rope(x, p) for p, x in enumerate(plain[0])]])
    keys, values = mx.array(exact.astype(np.float32)).astype(dtype), mx.arange(n, dtype=mx.float32)[None, :, None]
    rule = {"budget": 8, "recent": 7, "tau_init": 0.0, "tau_end": 0.0}
    kept, index, _, _, positions, *_ = batched(keys, values, list(range(1, n)), "contiguous", [0], **rule)
    assert positions.tolist() == [list(range(8))]
    assert index[0, 1:, 0].tolist() == list(range(n - 7, n))
    arrived = f64(keys)[0]
    ulp = 2**-10 if dtype == mx.float16 else 2**-7
    for label, came in enumerate(int(i) for i in index[0, :, 0].tolist()):
        expected = rope(rope(arrived[came], -came), label)
        np.testing.assert_allclose(f64(kept[0, label]), expected, rtol=ulp, atol=1e-4)


def test_indices_say_where_each_row_was() -> None:
    rng = np.random.default_rng(2)
    keys, values = rows(rng, 3, 30, 4), rows(rng, 3, 30, 6)
    for mode in MODES:
        for S in (1, 9):
            old = batched(keys[:, :20], values[:, :20], [], mode, [1, 2, 3], budget=11)
            new = keys[:, 20 : 20 + S], values[:, 20 : 20 + S]
            rest = {**RULE, "budget": 11, "next_pos": 20, "pos": 20, "seeds": [1, 2, 3], "position_mode": mode}
            *out, index = keyformer.keyformer_update_batched(*old[:5], *new, **rest, return_indices=True)
            assert index.dtype == mx.int32
            assert index.shape == (3, 11)
            for before, arrived, after in zip((old[0], old[1]), new, out[:2], strict=True):
                if mode == "original" or before is old[1]:
                    both = mx.concatenate([before, arrived], axis=1)
                    assert mx.array_equal(mx.take_along_axis(both, index[..., None], axis=1), after)
            assert (np.diff(np.array(index)) > 0).all()


@pytest.mark.parametrize("budget", [11, 12])  # a row in the middle goes; none does
def test_arrays_that_repeat_one_row_are_read_and_left_as_they_are(budget: int) -> None:
    """A broadcast array has one row of memory for all heads, a slice a gap between its numbers."""
    rng = np.random.default_rng(24)
    keys, values = rows(rng, 3, 21, 4), rows(rng, 3, 21, 6)
    old = batched(keys[:, :20], values[:, :20], [], "original", [1, 2, 3], budget=11, recent=2)
    plain = [*old[:4], mx.array(3 * old[4][:1].tolist())]
    views = [*old[:2], *(mx.repeat(a, 2, axis=1)[:, ::2] for a in old[2:4]), mx.broadcast_to(old[4][:1], (3, 11))]
    rest = {**RULE, "budget": budget, "recent": 2, "next_pos": 20, "pos": 20, "seeds": [1, 2, 3]}
    a, b = (
        keyformer.keyformer_update_batched(*x, keys[:, 20:], values[:, 20:], **rest, position_mode="original")
        for x in (plain, views)
    )
    for x, y in zip((*a[:5], *plain), (*b[:5], *views), strict=True):
        assert mx.array_equal(x, y)


def test_noise_is_that_of_the_position_across_its_blocks() -> None:
    zeros = mx.zeros((2, 600, 2))
    for cuts in ([], [255, 256, 257], [255, 257]):
        gumbel = batched(zeros, zeros, cuts, "original", [11, 12], budget=600)[3]
        for h, seed in enumerate((11, 12)):
            assert mx.array_equal(gumbel[h], noise.gumbel(seed, 0, mx.array(0), mx.arange(600)))


@pytest.mark.parametrize("mode", MODES)
def test_temperature_zero_is_h2o_whatever_the_seed(mode: str) -> None:
    """The seed's own statement: without noise the lowest accumulated score goes."""
    rng = np.random.default_rng(5)
    keys = rows(rng, 1, 60, 8)
    rule = {"budget": 12, "n_sink": 2, "recent": 4, "tau_init": 0.0, "tau_end": 0.0}
    a, b = (batched(keys, keys, [], mode, [seed], **rule) for seed in (0, 99))
    assert mx.array_equal(a[1], b[1])
    assert mx.array_equal(a[2], b[2])
    score: dict[int, float] = {}
    if mode == "original":
        k = f64(keys)[0]
        for t in range(60):
            if score:
                logits = np.array([k[i] @ k[t] / math.sqrt(8) for i in score])
                p = np.exp(logits - logits.max())
                score = {i: s + m for (i, s), m in zip(score.items(), p / p.sum(), strict=True)}
            score[t] = 0.0 if score else 1.0
            if len(score) > 12:
                free = list(score)[2:-4]
                del score[min(free, key=lambda i: (score[i], i))]
        assert a[4][0].tolist() == list(score)
        assert a[2][0].tolist() == pytest.approx(list(score.values()), abs=1e-5)


# -- the two walks -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not on_cpu(), reason="NumPy cannot read a CUDA array; the two walks meet on a CPU")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32), st.integers(0, 6), st.integers(1, 40), st.integers(0, 2), st.integers(0, 2), st.booleans()
)
def test_the_walk_on_a_device_is_the_walk_on_a_cpu(
    seed: int, m: int, S: int, n_sink: int, recent: int, bad: bool
) -> None:
    rng = np.random.default_rng(seed)
    budget = n_sink + recent + 2
    m = min(m, budget)
    keys, scores, g = rng.normal(size=(2, m + S, 4)), np.abs(rng.normal(size=(2, m + S))), rng.gumbel(size=(2, m + S))
    scores[:, m:] = 0
    if bad:
        at = rng.integers(0, m + S, 3)
        keys[0, at, 1], scores[0, at] = np.nan, -np.inf
    keys, scores, g = (a.astype(np.float32) for a in (keys, scores, g))
    taus = [0.1 * i for i in range(S)]
    stored, new = mx.array(keys[:, :m]), mx.array(keys[:, m:])
    index, kept = walk_numpy(stored, new, scores, budget, n_sink, recent, g, taus)
    other, also = walk_mlx(stored, new, mx.array(scores), budget, n_sink, recent, mx.array(g), taus)
    assert index.tolist() == other.tolist()
    np.testing.assert_allclose(kept, also, atol=1e-5)


@pytest.mark.parametrize("size", [13.0, 14.5, 40.0])
def test_a_row_that_went_takes_no_mass_however_large_its_logits(size: float) -> None:
    """Large keys go on arrival; a later one's logits with them are 70 to 800 above those with the rows that stayed."""
    rng = np.random.default_rng(20)
    keys = rng.normal(size=(60, 4)).astype(np.float32)
    keys[10::5] = [size, 0.0, 0.0, 0.0]
    one = Head(budget=6, n_sink=1, tau_init=0.0, tau_end=0.0, positions="original", storage=np.float32)
    for key in keys.astype(np.float64):
        one.insert(key, key, key)
    rule = {"budget": 6, "n_sink": 1, "tau_init": 0.0, "tau_end": 0.0}
    for cuts in ([], [30], list(range(1, 60))):
        _, values, scores, *_ = batched(mx.array(keys)[None], mx.array(keys)[None], cuts, "original", [0], **rule)
        assert np.array_equal(f64(values[0]), np.array([r.value for r in one.rows]))
        np.testing.assert_allclose(scores[0], one.scores(), rtol=1e-5)
        assert np.abs(f64(values)).max() < size


@pytest.mark.parametrize("most", [1, 2000])
def test_the_size_of_a_block_of_logits_does_not_matter(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by shorter blocks; 2000 logits are a block of 10 rows here, 1 a block of one."""
    rng = np.random.default_rng(21)
    keys, values = rows(rng, 2, 150, 8), rows(rng, 2, 150, 4)
    rule = {"budget": 20, "n_sink": 1, "recent": 3, "tau_end": 2.0, "anneal_steps": 90}
    whole = batched(keys, values, [70], "original", [1, 2], **rule)
    monkeypatch.setattr(eviction, "_LOGITS", most)
    short = batched(keys, values, [70], "original", [1, 2], **rule)
    for name, a, b in zip(ARRAYS, whole, short, strict=False):
        np.testing.assert_allclose(a, b, atol=1e-5 if name == "scores" else 0, err_msg=name)


def test_updates_away_from_a_cpu_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    keys, values = rows(rng, 2, 40, 8), rows(rng, 2, 40, 4)
    here = batched(keys, values, [20, 21, 22, 23], "original", [1, 2], budget=10, recent=2)
    monkeypatch.setattr(state, "on_cpu", lambda: False)
    there = batched(keys, values, [20, 21, 22, 23], "original", [1, 2], budget=10, recent=2)
    for name, a, b in zip(("keys", "values", "scores", "gumbel", "positions"), here, there, strict=False):
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("mode", MODES)
def test_one_eviction_by_itself(mode: str) -> None:
    """`keyformer_fused_evict` is the last step of an update."""
    rng = np.random.default_rng(3)
    keys, values = rows(rng, 2, 13, 6), rows(rng, 2, 13, 6)
    rule = {"budget": 12, "n_sink": 1, "recent": 2, "tau_init": 0.7, "tau_end": 0.7}
    after = batched(keys, values, [], mode, [1, 2], **rule)
    middle = batched(keys, values, [], mode, [1, 2], **{**rule, "budget": 13})
    *out, index = keyformer.keyformer_fused_evict(*middle[:5], 1, 1e4, 0.7, 2, return_indices=True, position_mode=mode)
    for a, b in zip(after, out, strict=False):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert index.shape == (2, 12)
    assert len(keyformer.keyformer_fused_evict(*middle[:5], n_sink=1, rope_base=1e4)) == 5


def test_metal_is_said_to_be_there_only_where_it_is() -> None:
    assert keyformer.metal_available() == mx.metal.is_available()


# -- bad keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", [batched, one_by_one])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 1, 5, 19])
def test_a_bad_key_is_ranked_last_and_costs_no_sink(update: Any, mode: str, bad: float, at: int) -> None:
    rng = np.random.default_rng(4)
    keys = rows(rng, 1, 30, 4)
    keys[0, at, 2] = bad
    values = mx.arange(30, dtype=mx.float32)[None, :, None]
    for cuts in ([], [at, at + 1], list(range(1, 30))):
        _, came, scores, *_ = update(keys, values, cuts, mode, [0], budget=9, n_sink=2, recent=3)
        kept = [int(p) for p in came[0, :, 0].tolist()]
        assert kept[:2] == [0, 1]
        assert kept[-3:] == [27, 28, 29]
        assert (at in kept) == (at < 2)
        good = [s for p, s in zip(kept, scores[0].tolist(), strict=True) if p != at]
        assert np.isfinite(good).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_key_gives_and_takes_no_mass(bad: float) -> None:
    """One bad number among good ones, as a stored row and as the new one: infinity must not take all the mass."""
    rng = np.random.default_rng(23)
    keys = f64(rows(rng, 30, 4))
    keys[[0, 20], 2] = bad
    one = Head(budget=9, n_sink=2, recent=3, tau_init=0.0, tau_end=0.0, positions="original", storage=np.float32)
    for key in keys:
        one.insert(key, key, key)
    new = mx.array(keys.astype(np.float32))[None]
    for cuts in ([], [20, 21], list(range(1, 30))):
        rule = {"budget": 9, "n_sink": 2, "recent": 3, "tau_init": 0.0, "tau_end": 0.0}
        _, _, scores, _, positions, *_ = batched(new, new, cuts, "original", [0], **rule)
        assert positions[0].tolist() == [r.label for r in one.rows]
        np.testing.assert_allclose(scores[0], one.scores(), atol=2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_key_is_bad_in_its_own_head_only(mode: str) -> None:
    rng = np.random.default_rng(26)
    keys = rows(rng, 3, 11, 4)
    keys[1, 10, 0] = math.inf
    before, after = (batched(keys[:, :n], keys[:, :n], [10][: n - 10], mode, [0, 1, 2], budget=20)[2] for n in (10, 11))
    assert after[:, 10].tolist() == [0.0, -math.inf, 0.0]
    assert (after[:, :10] - before).sum(axis=1).tolist() == pytest.approx([1.0, 0.0, 1.0], abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_row_with_the_lowest_score_of_all_gives_and_takes_no_mass(mode: str) -> None:
    """Whatever its key is: a good key with score -inf, one token at a time and two together."""
    rng = np.random.default_rng(25)
    keys = rows(rng, 1, 12, 4)
    out = batched(keys[:, :10], keys[:, :10], [], mode, [0], budget=20)
    scores = out[2].at[0, 3].add(-math.inf)
    results = []
    for cuts in ((10, 12), (10, 11, 12)):
        now = [*out[:2], scores, *out[3:]]
        for first, last in pairwise(cuts):
            new = keys[:, first:last]
            rest = {**RULE, "budget": 20, "next_pos": first, "pos": first, "seeds": [0], "position_mode": mode}
            now = list(keyformer.keyformer_update_batched(*now[:5], new, new, **rest))
        results.append(now[2])
        assert now[2][0, 3].item() == -math.inf
        gained = mx.where(mx.arange(12) == 3, 0.0, now[2]).sum() - mx.where(mx.arange(10) == 3, 0.0, scores).sum()
        assert gained.item() == pytest.approx(2, abs=1e-5)
    np.testing.assert_allclose(*results, atol=1e-5)


@pytest.mark.parametrize("size", [1e5, 1e20, 3e38])
@pytest.mark.parametrize("mode", MODES)
def test_large_keys_stay_numbers(mode: str, size: float) -> None:
    """1e20 squared is infinite in float32; the row takes all the mass, nothing becomes NaN, no dtype is narrowed."""
    keys = mx.ones((1, 12, 4)).at[0, 5].multiply(size)
    for cuts in ([3, 8], [3, 5, 6, 7, 8]):
        with warnings.catch_warnings(action="error"):
            kept, _, scores, *_ = batched(keys, keys, cuts, mode, [0], budget=6, n_sink=1, recent=2)
        assert mx.isfinite(scores).all()
        assert mx.isfinite(kept).all()
        assert kept.dtype == mx.float32


# -- state -------------------------------------------------------------------------------------------------------------


def test_an_empty_state() -> None:
    s = keyformer.init_keyformer_state(4, 64, 8)
    assert (s.keys, s.values, s.scores, s.gumbel, s.positions) == (None,) * 5
    assert (s.pos, s.next_pos, s.n_sink, s.budget, s.recent, s.seed) == (0, 0, 4, 64, 0, 0)
    assert (s.tau_init, s.tau_end, s.tau, s.anneal_steps, s.rope_base) == (1.0, 1.0, 1.0, 0, 10000.0)
    assert [a.shape for a in keyformer.keyformer_get_kv(s)] == [(0, 1), (0, 1)]
    assert keyformer.keyformer_fp16_bytes(s) == 0
    assert keyformer.keyformer_update(s, mx.zeros((0, 8)), mx.zeros((0, 8))) is s
    with pytest.raises(AttributeError):
        s.budget = 3  # type: ignore[misc]


def test_bytes_count_two_a_number_whatever_the_dtype() -> None:
    s = keyformer.init_keyformer_state(0, 5, 8)
    s = keyformer.keyformer_update(s, mx.zeros((9, 8)), mx.zeros((9, 3)))
    assert keyformer.keyformer_fp16_bytes(s) == 5 * (8 + 3) * 2
    assert keyformer.full_keyformer_fp16_bytes(9, 8) == 9 * 8 * 2 * 2


def test_the_deprecated_tau_sets_both_ends() -> None:
    with pytest.warns(DeprecationWarning, match="tau_init"):
        s = keyformer.init_keyformer_state(0, 5, 8, tau=0.25, tau_init=3.0)
    assert (s.tau, s.tau_init, s.tau_end) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize("mode", MODES)
def test_an_update_leaves_the_old_state_as_it_was(mode: str) -> None:
    rng = np.random.default_rng(6)
    keys = rows(rng, 40, 8)
    old = keyformer.init_keyformer_state(1, 10, 8, recent=2, positions=mode)
    old = keyformer.keyformer_update(old, keys[:20], keys[:20])
    names = ("keys", "values", "scores", "gumbel", "positions")
    before = [np.array(getattr(old, name)) for name in names]
    states = [old, copy.deepcopy(old)]
    for i in range(20, 40):
        states = [keyformer.keyformer_update(s, keys[i : i + 1], keys[i : i + 1]) for s in states]
    for name, b in zip(names, before, strict=True):
        assert np.array_equal(getattr(old, name), b)
        assert mx.array_equal(getattr(states[0], name), getattr(states[1], name))  # a copy goes on the same way


def test_rotated_keys_refuse_assignment_and_can_be_replaced_by_plain_ones() -> None:
    keys = mx.random.normal((30, 8))
    s = keyformer.init_keyformer_state(0, 10, 8)
    s = keyformer.keyformer_update(s, keys[:20], keys[:20])
    assert s.keys is not None
    with pytest.raises(TypeError, match="assigning rows"):
        s.keys[0] = 1.0
    with pytest.raises(TypeError, match="assigning rows"):
        s.keys.__imul__(2.0)
    plain = replace(s, keys=s.keys + 0)
    a, b = (keyformer.keyformer_update(x, keys[20:], keys[20:]) for x in (s, plain))
    np.testing.assert_allclose(a.keys, b.keys, atol=1e-5)


# -- states that share a log -------------------------------------------------------------------------------------------

ARRAYS = ("keys", "values", "scores", "gumbel", "positions")


def token(rng: np.random.Generator, S: int = 1, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    return rows(rng, S, 8, dtype=dtype), rows(rng, S, 5, dtype=dtype)


def standing_alone(s: keyformer.KeyformerState) -> keyformer.KeyformerState:
    """The same state of plain arrays with memory of their own."""
    arrays = {name: getattr(s, name) for name in ARRAYS}
    return replace(s, **{name: None if a is None else mx.array(a.tolist(), a.dtype) for name, a in arrays.items()})


def assert_same(a: keyformer.KeyformerState, b: keyformer.KeyformerState, atol: float = 0.0) -> None:
    """Equal rows, bit for bit, and scores within `atol`: a product over more rows may round the last bit otherwise."""
    assert (a.pos, a.next_pos) == (b.pos, b.next_pos)
    for name in ARRAYS:
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None)
        if x is not None:
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            np.testing.assert_allclose(f64(x), f64(y), atol=atol if name == "scores" else 0, rtol=0, err_msg=name)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from(MODES), st.sampled_from(DTYPES), st.integers(0, 2), st.data())
def test_states_read_late_and_updated_twice_are_what_they_were(
    seed: int, mode: str, dtype: mx.Dtype, recent: int, data: st.DataObject
) -> None:
    """A tree of states: any of them goes on, none is read before the end. Beside it the same tree of plain arrays."""
    rng = np.random.default_rng(seed)
    first = keyformer.init_keyformer_state(1, 6, 8, recent=recent, positions=mode, seed=3)
    tree = [(first, first)]
    steps = data.draw(st.integers(25, 60) if mode == "original" else st.integers(2, 12))
    newest = data.draw(st.lists(st.booleans(), min_size=steps, max_size=steps))
    for goes_on in newest:
        here, alone = tree[-1 if goes_on else int(rng.integers(len(tree)))]
        new = token(rng, 1 if rng.random() < 0.9 else 4, dtype)
        alone = keyformer.keyformer_update(alone, *new)
        # plain keys in "contiguous" lose the form before rotation, so there both sides keep it
        tree.append((keyformer.keyformer_update(here, *new), standing_alone(alone) if mode == "original" else alone))
    for here, alone in reversed(tree):
        assert_same(here, alone, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_together_read_late(dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(12)
    keys, values = rows(rng, 3, 90, 8, dtype=dtype), rows(rng, 3, 90, 5, dtype=dtype)
    more = {**RULE, "n_sink": 1, "budget": 12, "recent": 4, "seeds": [1, 2, 3], "position_mode": "original"}
    out: list[Any] = [None, None, None, None, None, 0, 0]
    states = []
    for i in range(90):
        new = keys[:, i : i + 1], values[:, i : i + 1]
        out = list(keyformer.keyformer_update_batched(*out[:5], *new, next_pos=i, pos=i, **more))
        states.append(out)
    for count in (89, 60, 30, 12, 5):
        whole = batched(
            keys[:, : count + 1],
            values[:, : count + 1],
            [],
            **{n: v for n, v in more.items() if n not in ("seeds", "position_mode")},
            mode="original",
            seeds=[1, 2, 3],
        )
        for a, b in zip(states[count][:5], whole[:5], strict=True):
            np.testing.assert_allclose(f64(a), f64(b), atol=1e-5 if a is states[count][2] else 0)


@pytest.mark.skipif(not on_cpu(), reason="rows lie in a log on a CPU only")
def test_one_row_is_written_and_none_is_copied() -> None:
    """Decoding at the budget: all states of a stretch read the same memory, in which each row was written once."""
    rng = np.random.default_rng(13)
    s = keyformer.init_keyformer_state(0, 200, 8, recent=50, positions="original")
    s = keyformer.keyformer_update(s, *token(rng, 300))
    logs = []
    for _ in range(60):
        s = keyformer.keyformer_update(s, *token(rng))
        logs.append(s.keys._slots.log)
    assert [log.capacity for log in dict.fromkeys(logs)] == [225, 225, 225]
    assert [logs.count(log) for log in dict.fromkeys(logs)] == [25, 25, 10]


def test_a_row_that_goes_on_arrival_leaves_keys_and_values_as_they_are() -> None:
    rng = np.random.default_rng(22)
    s = keyformer.init_keyformer_state(0, 20, 8, tau_init=0.0, tau_end=0.0, positions="original")
    s = keyformer.keyformer_update(s, *token(rng, 40))
    after = keyformer.keyformer_update(s, *token(rng))
    assert after.positions.tolist() == s.positions.tolist()
    assert not mx.array_equal(after.scores, s.scores)
    if on_cpu():
        assert (after.keys is s.keys, after.values is s.values) == (True, True)


def test_states_that_nobody_holds_are_gone() -> None:
    rng = np.random.default_rng(14)
    s = keyformer.init_keyformer_state(0, 40, 8, recent=10, positions="original")
    s = keyformer.keyformer_update(s, *token(rng, 60))
    kept = []
    gone: list[weakref.ref[Any]] = []
    gc.disable()  # without cycles, counting references is enough
    try:
        for i in range(100):
            if i == 30:
                kept.append(s)
            gone += [weakref.ref(s), weakref.ref(s.keys), weakref.ref(s.values)]
            s = keyformer.keyformer_update(s, *token(rng))
        alive = [ref() for ref in gone if ref() is not None]
        assert len(alive) == 3
        assert alive[0] is kept[0]
        if on_cpu():
            log = weakref.ref(kept[0].keys._slots.log)
            assert log() is not s.keys._slots.log
            del kept, alive
            assert log() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not on_cpu(), reason="rows lie in a log on a CPU only")
def test_many_states_of_one_log_share_its_rows() -> None:
    """A hundred states held at once take the rows of one log and their own bookkeeping, not a hundred copies."""
    rng = np.random.default_rng(15)
    s = keyformer.init_keyformer_state(0, 800, 64, recent=200, positions="original")
    s = keyformer.keyformer_update(s, *(rows(rng, 900, 64) for _ in range(2)))
    held = [keyformer.keyformer_update(s, *(rows(rng, 1, 64) for _ in range(2)))]
    mx.synchronize()
    before = mx.get_active_memory()
    for _ in range(99):
        held.append(keyformer.keyformer_update(held[-1], *(rows(rng, 1, 64) for _ in range(2))))
    mx.synchronize()
    one = 800 * 64 * 4 * 2
    assert mx.get_active_memory() - before < 99 * 0.1 * one


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_and_pickles_go_on_the_same_way(mode: str, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(16)
    s = keyformer.init_keyformer_state(1, 10, 8, recent=2, positions=mode)
    for S in (20, 1, 1):
        s = keyformer.keyformer_update(s, *token(rng, S, dtype))
    states = [s, copy.copy(s), copy.deepcopy(s), pickle.loads(pickle.dumps(s))]
    states += [replace(s, keys=copy.copy(s.keys)), replace(s, keys=pickle.loads(pickle.dumps(s.keys)))]
    if mode == "original":
        assert [type(x.keys) for x in (*states[2:4], *states[4:])] == [mx.array] * 4
    for _ in range(3):
        for other in states[1:]:
            assert_same(states[0], other)
        new = token(rng, 1, dtype)
        states = [keyformer.keyformer_update(x, *new) for x in states]


def test_an_array_changed_in_place_is_what_the_next_update_sees() -> None:
    rng = np.random.default_rng(17)
    s = keyformer.init_keyformer_state(0, 10, 8, recent=2, positions="original")
    for S in (20, 1):
        s = keyformer.keyformer_update(s, *token(rng, S))
    for name in ("keys", "values"):
        for change in (lambda a: a.__setitem__(3, 2.0), lambda a: a.__iadd__(1.0), lambda a: a.__imul__(-1.0)):
            s = keyformer.keyformer_update(s, *token(rng))
            before = np.array(getattr(s, name))
            change(getattr(s, name))
            assert not np.array_equal(before, getattr(s, name))
            new = token(rng)
            assert_same(keyformer.keyformer_update(s, *new), keyformer.keyformer_update(standing_alone(s), *new))


def test_keys_and_values_of_different_states_are_taken_as_they_are() -> None:
    rng = np.random.default_rng(18)
    s = keyformer.init_keyformer_state(0, 10, 8, recent=2, positions="original")
    s = keyformer.keyformer_update(s, *token(rng, 20))
    a = keyformer.keyformer_update(s, *token(rng))
    b = keyformer.keyformer_update(a, *token(rng))
    mixed = replace(b, values=a.values)
    new = token(rng)
    assert_same(keyformer.keyformer_update(mixed, *new), keyformer.keyformer_update(standing_alone(mixed), *new))


def test_threads_may_update_one_state() -> None:
    """The log's next row goes to one of them, the others copy. MLX evaluates an array in the thread that made it."""
    rng = np.random.default_rng(19)
    s = keyformer.init_keyformer_state(0, 30, 8, recent=10, positions="original")
    s = keyformer.keyformer_update(s, *token(rng, 40))
    news = [token(rng) for _ in range(4)]
    mx.eval(news)
    together = threading.Barrier(4)

    def update(i: int) -> keyformer.KeyformerState:
        together.wait()
        result = keyformer.keyformer_update(s, *news[i])
        together.wait()
        mx.eval([getattr(result, name) for name in ARRAYS])
        return result

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(40):
                mx.eval([getattr(s, name) for name in ARRAYS])
                results = list(pool.map(update, range(4)))
                for new, result in zip(news, results, strict=True):
                    assert_same(result, keyformer.keyformer_update(standing_alone(s), *new), atol=1e-5)
                s = results[0]
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("mode", MODES)
def test_memory_does_not_grow_from_token_to_token(mode: str) -> None:
    """Nobody evaluates anything here: no graph of old keys may pile up, below the budget or above it."""
    rng = np.random.default_rng(9)
    token = rows(rng, 4, 1, 32)
    out: list[Any] = [None, None, None, None, None, 0, 0]
    active = []
    for i in range(240):
        more = {**RULE, "budget": 100, "recent": 25, "position_mode": mode}
        out = list(
            keyformer.keyformer_update_batched(
                *out[:5], token, token, **more, next_pos=out[5], pos=out[6], seeds=[1, 2, 3, 4]
            )
        )
        if i in (139, 239):
            mx.synchronize()
            active.append(mx.get_active_memory())
    assert active[1] <= active[0] * 1.02 + 4096


def test_empty_calls() -> None:
    keys = mx.random.normal((2, 9, 4))
    none = batched(keys[:, :0], keys[:, :0], [], "contiguous", [0, 1])
    assert [a.shape for a in none[:5]] == [(2, 0, 4), (2, 0, 4), (2, 0), (2, 0), (2, 0)]
    assert none[5:] == [0, 0]
    a, b = (batched(keys, keys, cuts, "original", [0, 1]) for cuts in ([], [0, 0, 5, 5, 9]))
    assert all(mx.array_equal(x, y) for x, y in zip(a[:2], b[:2], strict=True))


# -- bad arguments -----------------------------------------------------------------------------------------------------

BAD = [
    ({"n_sink": -1}, "n_sink: expected an integer of at least 0, got -1"),
    ({"n_sink": 1.5}, "n_sink: expected an integer"),
    ({"recent": -1}, "recent: expected an integer of at least 0"),
    ({"recent": 0.25}, "recent: expected an integer"),
    ({"budget": 8.9}, "budget: expected an integer"),
    ({"budget": 0}, "budget: expected an integer of at least 1"),
    ({"budget": 0, "n_sink": -1}, "n_sink: expected"),
    ({"budget": True}, "budget: expected an integer"),
    ({"n_sink": 4}, "budget: expected more rows than are protected .* got 4; use at least 5"),
    ({"n_sink": 2, "recent": 2}, "budget: expected more rows than are protected"),
    ({"tau_init": -0.1}, "tau_init: expected a finite number from 0"),
    ({"tau_init": math.nan}, "tau_init: expected a finite"),
    ({"tau_end": math.inf}, "tau_end: expected a finite"),
    ({"tau_end": -1.0}, "tau_end: expected a finite"),
    ({"tau_init": 2.0, "anneal_steps": 5}, "tau_end: expected at least tau_init"),
    ({"anneal_steps": -1}, "anneal_steps: expected an integer of at least 0"),
    ({"anneal_steps": 2.5}, "anneal_steps: expected an integer"),
    ({"rope_base": 0.0}, "rope_base: expected a finite number above 0"),
    ({"rope_base": math.nan}, "rope_base: expected"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_what_cannot_work_is_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        keyformer.init_keyformer_state(head_dim=4, **{**RULE, **arguments})
    zeros = mx.zeros((1, 1, 4))
    with pytest.raises(ValueError, match=message):
        batched(zeros, zeros, [], "original", [0], **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed: expected an integer of at least 0"),
        ({"seed": 2**64}, "seed: expected an integer below"),
        ({"seed": 0.5}, "seed: expected an integer"),
        ({"head_dim": 0}, "head_dim: expected an integer of at least 1"),
        ({"positions": "absolute"}, "positions: expected 'contiguous' or 'original', got 'absolute'"),
        ({"tau": -1.0}, "tau_init: expected a finite"),
    ],
)
def test_what_only_the_state_takes_is_checked_there(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        keyformer.init_keyformer_state(**{"n_sink": 0, "budget": 4, "head_dim": 4, **arguments})


@pytest.mark.parametrize("seed", [True, 1.0, [1], -1, 2**64])
def test_a_seed_is_refused_whatever_passed_before(seed: Any) -> None:
    """True and 1.0 are equal to 1, and hash alike; a list has no hash."""
    zeros = mx.zeros((2, 1, 4))
    batched(zeros, zeros, [], "original", [2, 1])
    with pytest.raises(ValueError, match="seed: expected an integer"):
        batched(zeros, zeros, [], "original", [2, seed])


def test_a_temperature_may_fall_where_nothing_anneals() -> None:
    assert keyformer.init_keyformer_state(0, 4, 4, tau_init=2.0, tau_end=1.0).tau == 2.0


def test_rows_that_do_not_fit_are_refused() -> None:
    s = keyformer.init_keyformer_state(0, 4, 8)
    s = keyformer.keyformer_update(s, mx.zeros((2, 8)), mx.zeros((2, 3)))
    for keys, values, message in (
        (mx.zeros((1, 2, 8)), mx.zeros((1, 2, 8)), r"keys: expected \[S, D\]"),
        (mx.zeros((2, 8), mx.int32), mx.zeros((2, 8)), "keys: expected .* floating"),
        (mx.zeros((2, 8)), mx.zeros((3, 3)), "values: expected as many rows as keys"),
        (mx.zeros((2, 7)), mx.zeros((2, 3)), "keys: expected mlx.core.float32"),
        (mx.zeros((2, 8)), mx.zeros((2, 4)), "values: expected mlx.core.float32"),
        (mx.zeros((2, 8), mx.float16), mx.zeros((2, 3)), "keys: expected mlx.core.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            keyformer.keyformer_update(s, keys, values)
    zeros = mx.zeros((2, 6, 4))
    out = batched(zeros, zeros, [], "original", [0, 1])
    more = {**RULE, "next_pos": 6, "pos": 6, "seeds": [0, 1]}
    for arrays, arguments, message in (
        ([None, *out[1:5]], {}, "keys: expected an array"),
        (out[:5], {"seeds": [0]}, r"seeds: expected one per head \(2\), got 1"),
        (out[:5], {"budget": 3}, r"keys: expected at most budget \(3\) stored rows, got 4"),
        ([a[:1] for a in out[:5]], {}, r"keys: expected .* \(2, 4, 4\)"),
        (out[:5], {"next_pos": -1}, "next_pos: expected"),
        (out[:5], {"pos": 1.0}, "pos: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            keyformer.keyformer_update_batched(*arrays, zeros, zeros, **{**more, **arguments})
