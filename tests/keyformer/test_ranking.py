"""Ranks against the float64 oracle: every kind of attention, counts, pooling and noise, rows in any order."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Layer, Row

from keyformer import Policy
from keyformer.ranking import rank_rows

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    """Choices that rank_rows reads; those that have no effect beside the others are left out."""
    attention = draw(st.sampled_from(["query", "query", "key", "norm", "difference", "none"]))
    made: dict[str, Any] = {"attention": attention, "seed": draw(st.integers(0, 2**64 - 1))}
    if attention == "query":
        made["pooling"] = draw(st.sampled_from([1, 3, 7, 31]))
        made["normalize"] = draw(st.sampled_from(["none", "count"]))
        made |= draw(st.sampled_from([{}, {"window": 2}, {"window": 9}, {"decay": 0.5}, {"decay": 0.999}]))
    if draw(st.booleans()):
        made["noise"] = "select"
        if attention != "none":
            made["distribution"] = draw(st.sampled_from(["gumbel", "gaussian"]))
    return made


@st.composite
def caches(draw: st.DrawFn) -> dict[str, Any]:
    """What a cache has stored: rows in any order with gaps between their positions, and slots without a row."""
    B, H, D = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 8, 33]))
    slots = draw(st.integers(1, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    offset = np.array([slots + int(rng.integers(0, 60)) for _ in range(B)])
    shared = draw(st.booleans())  # whether the heads of a sequence have their rows in the same slots
    stored = np.repeat(rng.random((B, 1, slots)) < 0.8, H, axis=1) if shared else rng.random((B, H, slots)) < 0.8
    positions = np.array([[rng.permutation(o)[:slots] for _ in range(H)] for o in offset]).astype(np.int32)
    keys = rng.normal(size=(B, H, slots, D)) * draw(st.sampled_from([1e-3, 1.0, 50.0]))
    scores = rng.random((B, H, slots)).astype(np.float32) * 3
    bad = rng.random((B, H, slots)) < draw(st.sampled_from([0.0, 0.0, 0.3]))
    keys[bad, 0] = rng.choice([np.nan, np.inf, -np.inf], bad.sum())
    scores[bad] = -np.inf
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    # slots without a row hold whatever was there before, a large number or a key that is none
    scores[~stored] = rng.choice([0.0, 1e30, -np.inf], (~stored).sum())
    keys[~stored] = rng.choice([0.0, 3e4, np.nan])
    return {
        "positions": positions,
        "scores": scores,
        "keys": mx.array(keys).astype(dtype),
        "stored": stored,
        "stored_given": stored[:, :1] if shared else stored,
        "offset": offset,
        "tau": draw(st.sampled_from([0.0, 1.0, 2.5, [0.5, 1.0, 1.5][:B]])),
    }


@settings(max_examples=300, deadline=None, derandomize=True)
@given(choices(), caches(), st.integers(0, 40), st.booleans())
def test_against_the_oracle(made: dict[str, Any], c: dict[str, Any], layer: int, one_offset: bool) -> None:
    B, H, slots = c["scores"].shape
    tau = c["tau"]
    taus = tau if isinstance(tau, list) else [tau] * B
    offsets = mx.array(c["offset"].astype(np.int32))[:, None, None]
    got = rank_rows(
        Policy(**made),
        layer,
        mx.array(c["scores"]),
        mx.array(c["positions"]),
        c["keys"],
        mx.array(c["stored_given"]),
        int(c["offset"][0]) if one_offset and B == 1 else offsets,
        mx.array(tau, mx.float32)[:, None, None] if isinstance(tau, list) else tau,
    )
    assert got.dtype == mx.float32
    assert got.shape == (B, H, slots)
    ranks = np.array(got)
    assert not np.isnan(ranks).any()
    keys = np.array(c["keys"].astype(mx.float32))
    for b, h in np.ndindex(B, H):
        at = np.flatnonzero(c["stored"][b, h])
        rows = [
            Row(int(c["positions"][b, h, i]), keys[b, h, i], keys[b, h, i], float(c["scores"][b, h, i])) for i in at
        ]
        one = Layer(H, None, layer=layer, tau_init=taus[b], **made)
        expected = np.array(one.rank(h, rows, int(c["offset"][b])))
        assert (np.isneginf(ranks[b, h, at]) == np.isneginf(expected)).all()
        good = np.isfinite(expected)
        np.testing.assert_allclose(ranks[b, h, at][good], expected[good], rtol=3e-6, atol=2e-6)


def ranked(
    policy: Policy, rows: dict[int, tuple[float, list[float]]], offset: int, tau: float = 1.0
) -> dict[int, float]:
    """position -> rank of rows given as position -> (score, key), one head, all stored, in the order given."""
    positions = list(rows)
    got = rank_rows(
        policy,
        0,
        mx.array([[[rows[p][0] for p in positions]]]),
        mx.array([[positions]]),
        mx.array([[[rows[p][1] for p in positions]]]),
        mx.ones((1, 1, len(positions)), mx.bool_),
        offset,
        tau,
    )
    return dict(zip(positions, got[0, 0].tolist(), strict=True))


def test_worked_example_of_the_count() -> None:
    """10 tokens seen. The row at 7 was seen by queries 7, 8, 9; at most the last 4 count in a window of 4."""
    rows = {0: (6.0, [0.0]), 7: (6.0, [0.0]), 9: (6.0, [0.0])}
    assert ranked(Policy(normalize="count"), rows, 10) == pytest.approx({0: 0.6, 7: 2.0, 9: 6.0})
    assert ranked(Policy(normalize="count", window=4), rows, 10) == pytest.approx({0: 1.5, 7: 2.0, 9: 6.0})
    # with decay 1/2 they count 1 + 1/2 + 1/4 = 7/4; ten of them 2 - 1/512; one of them 1
    expected = {0: 6 / (2 - 1 / 512), 7: 24 / 7, 9: 6.0}
    assert ranked(Policy(normalize="count", decay=0.5), rows, 10) == pytest.approx(expected)


def test_a_slow_decay_counts_a_million_queries() -> None:
    """1 - a and 1 - a**m are differences of near equals: 999999 queries of decay 1 - 1e-6 count (1 - a**m) / 1e-6."""
    decay, age = 1 - 1e-6, 999_999
    got = ranked(Policy(normalize="count", decay=decay), {1: (1.0, [0.0])}, age + 1)[1]
    assert got == pytest.approx(1 / math.fsum(decay**i for i in range(age)), rel=1e-5)


def test_worked_example_of_pooling() -> None:
    """Temporal order is 2, 5, 6, 9; each takes the mean of itself and the stored rows beside it, two at the ends."""
    rows = {6: (4.0, [0.0]), 2: (1.0, [0.0]), 9: (10.0, [0.0]), 5: (1.0, [0.0])}
    expected = {2: 1.0, 5: 2.0, 6: 5.0, 9: 7.0}  # (1 + 1)/2, (1 + 1 + 4)/3, (1 + 4 + 10)/3, (4 + 10)/2
    assert ranked(Policy(pooling=3), rows, 10) == pytest.approx(expected)
    # a row that cannot be ranked is nobody's neighbour: 5 and 9 are now beside each other
    rows[6] = (-math.inf, [math.nan])
    expected = {2: 1.0, 5: 4.0, 6: -math.inf, 9: 5.5}
    assert ranked(Policy(pooling=3), rows, 10) == pytest.approx(expected)


def test_worked_example_of_the_norm() -> None:
    rows = {0: (9.0, [3.0, 4.0]), 1: (0.0, [0.0, 0.0]), 2: (-math.inf, [math.inf, 0.0]), 3: (0.0, [0.0, -1.0])}
    assert ranked(Policy(attention="norm"), rows, 4) == pytest.approx({0: -5.0, 1: 0.0, 2: -math.inf, 3: -1.0})


def test_worked_example_of_the_difference() -> None:
    """Directions (1, 0), (1, 0), (0, 1): their mean points to (2, 1) / sqrt 5. A length says nothing."""
    rows = {0: (0.0, [5.0, 0.0]), 1: (0.0, [0.1, 0.0]), 2: (0.0, [0.0, 7.0])}
    five = 5**0.5
    got = ranked(Policy(attention="difference"), rows, 3)
    assert got == pytest.approx({0: -2 / five, 1: -2 / five, 2: -1 / five}, abs=1e-6)
    # opposite keys have no mean direction, and a key of zeros has none either
    rows = {0: (0.0, [1.0, 0.0]), 1: (0.0, [-1.0, 0.0]), 2: (0.0, [0.0, 0.0])}
    assert ranked(Policy(attention="difference"), rows, 3) == {0: 0.0, 1: 0.0, 2: 0.0}


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e15, 1e30, 3e38])
@pytest.mark.parametrize("attention", ["norm", "difference"])
def test_keys_of_any_size_have_a_rank(attention: Any, size: float) -> None:
    """Beyond 1e19 the square leaves float32: such a key is infinitely long and goes first, or has no direction."""
    rows = {0: (0.0, [size, 0.0]), 1: (0.0, [0.0, size / 2]), 2: (0.0, [size / 4, size / 4]), 3: (0.0, [1.0, 0.0])}
    got = ranked(Policy(attention=attention), rows, 4)
    assert not any(math.isnan(rank) for rank in got.values())
    if 1e-19 < size < 1e19:
        if attention == "norm":
            assert got == pytest.approx({0: -size, 1: -size / 2, 2: -size * 2**0.5 / 4, 3: -1.0}, rel=1e-6)
        else:  # the sum of the directions is (2, 1) + (1, 1) / sqrt 2
            x, y = 2 + 0.5**0.5, 1 + 0.5**0.5
            length = math.hypot(x, y)
            expected = {0: -x / length, 1: -y / length, 2: -(x + y) / 2**0.5 / length, 3: -x / length}
            assert got == pytest.approx(expected, abs=1e-6)
    elif attention == "norm":
        huge = size > 1
        assert {p: got[p] for p in (0, 1, 2)} == pytest.approx(dict.fromkeys(range(3), -math.inf if huge else 0.0))
    else:
        assert got == pytest.approx({0: 0.0, 1: 0.0, 2: 0.0, 3: -1.0})


def test_noise_is_added_last() -> None:
    """The noise of a row is not divided by its count, nor averaged with its neighbours'."""
    rows = {p: (float(p), [0.0]) for p in range(8)}
    plain = Policy(normalize="count", pooling=3)
    noisy = Policy(normalize="count", pooling=3, noise="select", seed=5)
    bare = Policy(noise="select", seed=5)
    a, b, c = (ranked(p, rows, 8, tau=0.5) for p in (plain, noisy, bare))
    assert b == pytest.approx({p: a[p] + (c[p] - p) for p in rows}, abs=1e-5)
