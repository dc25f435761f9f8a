"""Which row goes: the worked example, brute force with many ties, and the walk against the oracle."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import oracle
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from keyformer import noise
from keyformer.eviction import evict_row, keep_rows, take_rows, walk

FEW = st.sampled_from([0.0, 1.0, 1.0, 2.0, -1.0, math.nan, -math.inf])  # so that ties are the rule


def as_arrays(*arrays: Any) -> tuple[mx.array, ...]:
    return tuple(mx.array(np.asarray(a)) for a in arrays)


@st.composite
def rankings(draw: st.DrawFn) -> dict[str, Any]:
    B, H, n = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(2, 14))
    n_sink = draw(st.integers(0, 3))
    recent = draw(st.integers(0, 4))
    offset = n + draw(st.integers(0, 6))
    rank = np.array(draw(st.lists(FEW, min_size=B * H * n, max_size=B * H * n)), np.float32).reshape(B, H, n)
    heads = [sorted(draw(st.permutations(range(offset)))[:n]) for _ in range(B * H)]
    positions = np.array(heads, np.int32).reshape(B, H, n)
    return {"rank": rank, "positions": positions, "n_sink": n_sink, "recent": recent, "offset": offset}


def protected(c: dict[str, Any], b: int, h: int) -> np.ndarray:
    return (c["positions"][b, h] < c["n_sink"]) | (c["positions"][b, h] >= c["offset"] - c["recent"])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rankings(), st.data())
def test_keep_rows_against_brute_force(c: dict[str, Any], data: st.DataObject) -> None:
    B, H, n = c["rank"].shape
    shielded = max(protected(c, b, h).sum() for b, h in np.ndindex(B, H))
    assume(shielded < n)
    budget = data.draw(st.integers(max(1, int(shielded)), n - 1))
    kept = keep_rows(*as_arrays(c["rank"], c["positions"]), c["offset"], budget, c["n_sink"], c["recent"])
    assert kept.shape == (B, H, budget)
    for b, h in np.ndindex(B, H):
        gone = oracle.dropped(c["rank"][b, h], c["positions"][b, h], protected(c, b, h), n - budget)
        assert kept[b, h].tolist() == [i for i in range(n) if i not in gone]  # temporal order too


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rankings(), st.data())
def test_evict_row_against_brute_force_whatever_the_order(c: dict[str, Any], data: st.DataObject) -> None:
    """Rows in any order, some slots not in use."""
    B, H, n = c["rank"].shape
    order = list(data.draw(st.permutations(range(n))))
    for name in ("rank", "positions"):
        c[name] = c[name][..., order]
    stored = np.array(data.draw(st.lists(st.booleans(), min_size=B * n, max_size=B * n))).reshape(B, 1, n)
    free = [stored[b, 0] & ~protected(c, b, h) for b, h in np.ndindex(B, H)]
    assume(all(f.any() for f in free))
    offset, recent = mx.full((B, 1, 1), c["offset"]), mx.full((B, 1, 1), c["recent"])
    gone = evict_row(*as_arrays(c["rank"], c["positions"], stored), offset, c["n_sink"], recent)
    assert gone.shape == (B, H, 1)
    for b, h in np.ndindex(B, H):
        out = protected(c, b, h) | ~stored[b, 0]
        assert gone[b, h].tolist() == oracle.dropped(c["rank"][b, h], c["positions"][b, h], out, 1)


def test_each_sequence_of_a_batch_has_its_own_recent_rows_and_offset() -> None:
    rank, positions = mx.zeros((2, 1, 4)), mx.array([[[0, 1, 2, 3]], [[10, 11, 12, 13]]])
    stored = mx.ones((2, 1, 4), mx.bool_)
    rank = mx.array([[[3.0, 2, 1, 0]], [[3.0, 2, 1, 0]]])
    gone = evict_row(rank, positions, stored, mx.array([[[4]], [[14]]]), 0, mx.array([[[1]], [[3]]]))
    assert gone.tolist() == [[[2]], [[0]]]


def test_protected_rows_outlive_everything() -> None:
    """The first two and the last two have the worst ranks of all, NaN and -inf among them, and still stay."""
    rank = mx.array([[[math.nan, -math.inf, 5.0, 7.0, 6.0, -math.inf, math.nan]]])
    positions = mx.arange(7)[None, None]
    assert keep_rows(rank, positions, 7, 5, 2, 2).tolist() == [[[0, 1, 3, 5, 6]]]
    gone = evict_row(rank, positions, mx.ones((1, 1, 7), mx.bool_), mx.array([[[7]]]), 2, mx.array([[[2]]]))
    assert gone.tolist() == [[[2]]]


def test_nan_and_minus_infinity_go_before_the_lowest_number() -> None:
    lowest = -float(np.finfo(np.float32).max)
    rank = mx.array([[[lowest, 0.0, -math.inf, math.nan]]])
    positions = mx.arange(4)[None, None]
    assert keep_rows(rank, positions, 4, 2, 0, 0).tolist() == [[[0, 1]]]
    assert keep_rows(rank, positions, 4, 3, 0, 0).tolist() == [[[0, 1, 3]]]  # between the two, position decides


# -- the walk ----------------------------------------------------------------------------------------------------------


def test_the_example_of_the_specification() -> None:
    keys = mx.zeros((1, 1, 10, 4))
    kept, scores = walk(keys[:, :, :0], keys, mx.zeros((1, 1, 10)), 4, 0, 0)
    assert kept.tolist() == [[[0, 1, 2, 3]]]
    assert scores[0, 0].tolist() == pytest.approx([4.3333, 2.3333, 1.8333, 1.5], abs=1e-4)
    one = oracle.Layer(1, 4, attention="key")
    none = np.zeros((1, 10, 4))
    one.prompt(none, none, none, 1.0)
    one.end_prefill()
    assert one.positions(0) == [0, 1, 2, 3]
    assert one.scores(0) == pytest.approx([13 / 3, 7 / 3, 11 / 6, 3 / 2])


@st.composite
def walks(draw: st.DrawFn) -> dict[str, Any]:
    n_sink, recent = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    H, n, D = draw(st.integers(1, 3)), draw(st.integers(1, 30)), draw(st.sampled_from([1, 5, 8]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    keys = rng.normal(size=(1, H, n, D)).astype(np.float32) * draw(st.sampled_from([0.5, 2.0]))
    for i in draw(st.lists(st.integers(0, n - 1), max_size=3)):
        keys[0, i % H, i, 0] = draw(st.sampled_from([np.nan, np.inf]))
    return {
        "keys": keys,
        "budget": n_sink + recent + draw(st.integers(1, 8)),
        "n_sink": n_sink,
        "recent": recent,
        "noise": draw(st.sampled_from(["none", "select"])),
        "schedule": draw(st.sampled_from([(1.0, 1.0, 0), (0.0, 0.0, 0), (1.0, 3.0, 10)])),
        "seed": draw(st.integers(0, 2**40)),
        "cuts": sorted(draw(st.lists(st.integers(0, n), max_size=4))),
    }


def walk_in_blocks(c: dict[str, Any], cuts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Positions and scores of the survivors, the new rows given to `walk` in blocks."""
    _, H, n, D = c["keys"].shape
    kept = mx.zeros((1, H, 0, D))
    scores, positions = mx.zeros((1, H, 0)), mx.zeros((1, H, 0), mx.int32)
    for first, last in zip([0, *cuts], [*cuts, n], strict=True):
        new = mx.array(c["keys"][:, :, first:last])
        start = mx.where(mx.all(mx.isfinite(new), axis=-1), 0.0, -mx.inf)
        keys = mx.concatenate([kept, new], axis=2)
        scores = mx.concatenate([scores, start], axis=2)
        rows = mx.broadcast_to(mx.arange(first, last, dtype=mx.int32), start.shape)
        positions = mx.concatenate([positions, rows], axis=2)
        index, scores = walk(
            kept,
            new,
            scores,
            c["budget"],
            c["n_sink"],
            c["recent"],
            noise.gumbel(c["seed"], 5, mx.arange(H)[:, None], positions) if c["noise"] == "select" else None,
            [noise.temperature(t, *c["schedule"]) for t in range(first, last)],
        )
        kept = mx.take_along_axis(keys, index[..., None], axis=2)
        positions = mx.take_along_axis(positions, index, axis=2)
    return np.array(positions)[0], np.array(scores)[0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(walks())
def test_walk_against_the_oracle_in_any_blocks(c: dict[str, Any]) -> None:
    H = c["keys"].shape[1]
    tau_init, tau_end, steps = c["schedule"]
    same = {name: c[name] for name in ("n_sink", "recent", "noise", "seed")}
    one = oracle.Layer(
        H, c["budget"], attention="key", layer=5, tau_init=tau_init, tau_end=tau_end, anneal_steps=steps, **same
    )
    one.prompt(c["keys"][0], c["keys"][0], c["keys"][0], 1.0)
    one.end_prefill()
    assume(one.margin > 1e-5)
    for cuts in ([], c["cuts"]):
        positions, scores = walk_in_blocks(c, cuts)
        for h in range(H):
            assert positions[h].tolist() == one.positions(h)
            np.testing.assert_allclose(scores[h], one.scores(h), atol=2e-5)


def test_walk_beyond_one_block_of_logits() -> None:
    rng = np.random.default_rng(1)
    c = {"budget": 20, "n_sink": 2, "recent": 5, "noise": "select", "schedule": (1.0, 1.0, 0), "seed": 3, "cuts": []}
    c["keys"] = rng.normal(size=(1, 2, 600, 4)).astype(np.float32)
    one = oracle.Layer(2, 20, attention="key", noise="select", layer=5, n_sink=2, recent=5, seed=3)
    for first in range(0, 600, 100):  # the oracle's own attention output is not needed, so it is kept short
        one.waiting = [
            one.waiting[h]
            + [oracle.Row(i, k := c["keys"][0, h, i].astype(float), k) for i in range(first, first + 100)]
            for h in range(2)
        ]
        one.end_prefill()
    assert one.margin > 1e-5
    for cuts in ([], [256], [1, 300]):
        positions, scores = walk_in_blocks(c, cuts)
        assert positions.tolist() == [one.positions(0), one.positions(1)]
        np.testing.assert_allclose(scores, [one.scores(0), one.scores(1)], rtol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("size", [1, 3, 4, 6, 8])
def test_rows_are_taken_bit_for_bit(dtype: mx.Dtype, size: int) -> None:
    a = mx.random.normal((3, 7, size), key=mx.random.key(size)).astype(dtype)
    a[0, 2] = mx.nan
    index = mx.array([[6, 0, 2, 2], [1, 1, 5, 0], [3, 4, 6, 2]])
    taken = take_rows(a[:, :, :], index)
    expected = mx.take_along_axis(a, index[..., None], axis=1)
    assert taken.dtype == dtype and taken.shape == (3, 4, size)
    assert mx.array_equal(taken, expected, equal_nan=True)
    half = mx.concatenate([a, a], axis=1)[:, 3:10]  # rows of an array that goes on
    assert mx.array_equal(take_rows(half, index), mx.take_along_axis(half, index[..., None], axis=1), equal_nan=True)
