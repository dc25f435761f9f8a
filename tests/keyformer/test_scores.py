"""Attention mass against the float64 oracle: shapes, dtypes, masks, unusable rows, noise, weights, sinks, tiles."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyformer.scores import LogitNoise, attention_mass

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def as_float64(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    B, Hkv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 5]))
    S = draw(st.integers(1, 9))
    n = S + draw(st.integers(0, 12))
    D = draw(st.sampled_from([1, 3, 8, 17, 33]))
    Hq = Hkv * group
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    queries = mx.array(rng.normal(size=(B, Hq, S, D))).astype(dtype)
    keys = mx.array(rng.normal(size=(B, Hkv, n, D))).astype(dtype)
    allowed, added = np.ones((B, Hq, S, n), bool), np.zeros((B, Hq, S, n))
    mask: Any = None
    kind = draw(st.sampled_from(["none", "causal", "bool", "float", "lowest"]))
    if kind == "causal":
        mask = "causal"
        allowed &= np.arange(n) <= np.arange(S)[:, None] + n - S
    elif kind != "none":
        shape = draw(st.sampled_from([(B, Hq, S, n), (B, 1, S, n), (1, 1, S, n), (B, 1, 1, n), (S, n), (1, Hq, S, n)]))
        seen = rng.random(shape) < 0.7
        allowed &= seen
        if kind == "bool":
            mask = mx.array(seen)
        else:
            mask_dtype = draw(st.sampled_from([mx.float32, dtype]))
            hidden = mx.finfo(mask_dtype).min if kind == "lowest" else -mx.inf
            bias = mx.array(rng.normal(size=shape)).astype(mask_dtype)
            mask = mx.where(mx.array(seen), bias, mx.array(hidden, mask_dtype))
            added += np.where(seen, as_float64(bias), 0)
    usable = None
    if draw(st.booleans()):
        good = rng.random((B, Hkv, n)) < 0.8
        usable = mx.array(good)
        allowed &= np.repeat(good, group, axis=1)[:, :, None]
    return {
        "queries": queries,
        "keys": keys,
        "scale": draw(st.sampled_from([0.25, 1.0])),
        "mask": mask,
        "usable": usable,
        "noise": draw(st.sampled_from(["none", "redrawn", "frozen"])),
        "distribution": draw(st.sampled_from(["gumbel", "gaussian", "constant"])),
        "tau": draw(st.sampled_from([1.0, 0.5, 2, [1.0, 1.5, 2.0][:B]])),
        "weight": draw(st.sampled_from([None, 0.9 ** rng.permutation(S), rng.random((B, S))])),
        "sinks": draw(st.sampled_from([None, rng.normal(size=Hq), np.full(Hq, -30.0), np.full(Hq, 30.0)])),
        "soft_cap": draw(st.sampled_from([None, None, 0.7, 30.0])),
        "allowed": allowed,
        "added": added,
    }


def expected_and_options(call: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
    """The oracle's mass of every query, and the same noise, tau, weight, sinks and cap as our function takes them."""
    B, Hq, S, _ = call["queries"].shape
    Hkv, n = call["keys"].shape[1:3]
    rows = np.arange(B * Hkv * n).reshape(B, Hkv, n) * 3 % 101  # positions in no order, different in each head
    asking = None if call["noise"] == "frozen" else np.arange(B * S).reshape(B, S) + 40
    g = np.zeros((B, Hq, S, n))
    if call["noise"] != "none":
        for b, h, i, r in np.ndindex(g.shape):
            query = None if asking is None else int(asking[b, i])
            g[b, h, i, r] = oracle.draw(call["distribution"], 9, 4, h, int(rows[b, h * Hkv // Hq, r]), query)
    tau, weight, sinks = call["tau"], call["weight"], call["sinks"]
    taus = tau if isinstance(tau, list) else [tau] * B
    each = [
        oracle.mass(
            *(as_float64(call[name])[b : b + 1] for name in ("queries", "keys")),
            call["scale"],
            *(a[b : b + 1] for a in (call["allowed"], call["added"], g)),
            taus[b],
            None if weight is None else np.broadcast_to(weight, (B, S))[b : b + 1],
            sinks,
            call["soft_cap"],
        )
        for b in range(B)
    ]
    noise = LogitNoise(
        9,
        4,
        mx.array(rows.astype(np.int32)),
        None if asking is None else mx.array(asking.astype(np.int32)),
        call["distribution"],
    )
    return np.concatenate(each), {
        "usable": call["usable"],
        "noise": None if call["noise"] == "none" else noise,
        "tau": mx.array(tau, mx.float32)[:, None, None, None] if isinstance(tau, list) else tau,
        "weight": None if weight is None else mx.array(weight.astype(np.float32)),
        "sinks": None if sinks is None else mx.array(sinks.astype(np.float32)),
        "soft_cap": call["soft_cap"],
    }


@settings(max_examples=250, deadline=None, derandomize=True)
@given(calls(), st.integers(1, 4000))
def test_against_the_oracle(call: dict[str, Any], tile_bytes: int) -> None:
    expected, options = expected_and_options(call)
    arguments = (call["queries"], call["keys"], call["scale"], call["mask"])
    each = attention_mass(*arguments, **options, per_query=True)
    assert each.dtype == mx.float32
    np.testing.assert_allclose(np.array(each), expected, atol=3e-6)
    total = attention_mass(*arguments, **options)
    assert total.dtype == mx.float32
    np.testing.assert_allclose(np.array(total), expected.sum(axis=2), atol=1e-5)
    if call["weight"] is None and call["sinks"] is None:
        # mass is conserved: one per query head and query that sees a row
        asking = call["allowed"].any(axis=-1).sum()
        assert total.sum().item() == pytest.approx(asking, abs=1e-3)
    # tiles change nothing
    for per_query, whole in ((False, total), (True, each)):
        tiled = attention_mass(*arguments, **options, per_query=per_query, tile_bytes=tile_bytes)
        np.testing.assert_allclose(np.array(tiled), np.array(whole), rtol=1e-6, atol=1e-6)


def test_worked_example() -> None:
    """Two query heads on one KV head. Logits 0 and ln 3 give 1/4 and 3/4; the first causal query sees row 0 alone."""
    keys = mx.array([[[[0.0], [1.0]]]])
    log3 = float(np.log(3))
    queries = mx.array([[[[5.0], [log3]], [[5.0], [-log3]]]])
    assert attention_mass(queries, keys, 1.0, "causal").tolist()[0][0] == pytest.approx([1 + 1 + 1 / 4 + 3 / 4, 1.0])
    each = attention_mass(queries, keys, 1.0, "causal", per_query=True)
    assert np.array(each).tolist() == [[[pytest.approx([2, 0]), pytest.approx([1, 1])]]]
    # all queries see both rows, and the scale halves the exponent: sqrt 3
    halved = attention_mass(queries[:, :1, 1:], keys, 0.5)
    assert halved.tolist()[0][0] == pytest.approx([1 / (1 + 3**0.5), 3**0.5 / (1 + 3**0.5)])


def test_worked_examples_of_tau_weight_sink_and_cap() -> None:
    """One query, two rows with logits 0 and ln 9: 1/10 and 9/10."""
    keys, queries = mx.array([[[[0.0], [1.0]]]]), mx.array([[[[float(np.log(9))]]]])

    def mass(**options: Any) -> Any:
        return attention_mass(queries, keys, 1.0, **options).tolist()[0][0]

    assert mass() == pytest.approx([0.1, 0.9])
    # tau 2 takes the square root of the odds: 1 to 3
    assert mass(tau=2.0) == pytest.approx([0.25, 0.75])
    assert mass(tau=mx.full((1, 1, 1, 1), 2.0)) == pytest.approx([0.25, 0.75])
    assert mass(weight=mx.array([0.5])) == pytest.approx([0.05, 0.45])
    # a sink of logit ln 10 takes 10 parts of 20; with tau 2, sqrt 10 parts of 4 + sqrt 10
    sink = mx.array([float(np.log(10))])
    assert mass(sinks=sink) == pytest.approx([0.05, 0.45])
    parts = 4 + 10**0.5
    assert mass(sinks=sink, tau=2.0) == pytest.approx([1 / parts, 3 / parts])
    # a cap of ln 9 / 2 turns ln 9 into ln 9 / 2 * tanh(2)
    odds = 9 ** (np.tanh(2) / 2)
    assert mass(soft_cap=float(np.log(9)) / 2) == pytest.approx([1 / (1 + odds), odds / (1 + odds)])


def test_a_constant_changes_no_softmax_and_the_other_arms_do() -> None:
    """The constant arm of the paper's table: what it reports as far worse than no noise is no noise."""
    rng = np.random.default_rng(1)
    q, k = mx.array(rng.normal(size=(1, 4, 20, 8))), mx.array(rng.normal(size=(1, 2, 30, 8)))
    positions, asking = mx.broadcast_to(mx.arange(30), (1, 2, 30)), mx.arange(10, 30)[None]
    for tau in (1.0, 1.7):
        plain = np.array(attention_mass(q, k, 0.3, "causal", tau=tau))
        arms = {
            arm: np.array(attention_mass(q, k, 0.3, "causal", noise=LogitNoise(0, 0, positions, asking, arm), tau=tau))
            for arm in ("constant", "gaussian", "gumbel")
        }
        np.testing.assert_allclose(arms.pop("constant"), plain, atol=1e-5)
        for noisy in arms.values():
            assert np.abs(noisy - plain).max() > 0.1
        assert np.abs(arms["gaussian"] - arms["gumbel"]).max() > 0.1


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("per_query", [False, True])
def test_what_changes_nothing_changes_no_bit(mask: str | None, per_query: bool) -> None:
    rng = np.random.default_rng(2)
    q, k = mx.array(rng.normal(size=(2, 4, 20, 8))), mx.array(rng.normal(size=(2, 2, 30, 8)))
    positions = mx.broadcast_to(mx.arange(30), (2, 2, 30))
    for noise in (None, LogitNoise(3, 1, positions, None)):
        plain = attention_mass(q, k, 0.3, mask, noise=noise, per_query=per_query)
        for options in ({"tau": mx.ones((2, 1, 1, 1))}, {"weight": mx.ones(20)}, {"weight": mx.ones((2, 20))}):
            got = attention_mass(q, k, 0.3, mask, noise=noise, per_query=per_query, **options)
            assert mx.array_equal(got, plain)


def test_sinks_and_cap_are_those_of_mlxs_attention() -> None:
    """The share a sink leaves to the rows is what mlx's own attention lets through: values of one."""
    rng = np.random.default_rng(4)
    q, k = mx.array(rng.normal(size=(1, 4, 6, 64))), mx.array(rng.normal(size=(1, 2, 9, 64)))
    sinks = mx.array(rng.normal(size=4))
    out = mx.fast.scaled_dot_product_attention(q, k, mx.ones_like(k), scale=0.2, mask="causal", sinks=sinks)
    through = out[..., 0].reshape(1, 2, 2, 6).sum(axis=2)
    mass = attention_mass(q, k, 0.2, "causal", sinks=sinks, per_query=True)
    np.testing.assert_allclose(np.array(mass.sum(axis=-1)), np.array(through), atol=1e-5)


@pytest.mark.parametrize("tile_bytes", [1, 1 << 28])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_a_nan_or_infinite_query_gives_no_mass(value: float, mask: str | None, tile_bytes: int) -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(1, 4, 5, 8)), mx.array(rng.normal(size=(1, 2, 7, 8)))
    sound = np.array(attention_mass(mx.array(q), k, 0.3, mask, per_query=True))
    q[0, 1, 3, 2] = value
    got = attention_mass(mx.array(q), k, 0.3, mask, tile_bytes=tile_bytes)
    assert got.sum().item() == pytest.approx(4 * 5 - 1)
    np.testing.assert_allclose(np.array(got)[0, 1], sound[0, 1].sum(axis=0), atol=1e-6)  # the other KV head
    each = attention_mass(mx.array(q), k, 0.3, mask, per_query=True, tile_bytes=tile_bytes)
    np.testing.assert_allclose(np.array(each)[0, 0, [0, 1, 2, 4]], sound[0, 0, [0, 1, 2, 4]], atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_nan_or_infinite_key_that_is_not_usable_takes_nothing(value: float) -> None:
    rng = np.random.default_rng(0)
    q, k = mx.array(rng.normal(size=(1, 4, 3, 8))), rng.normal(size=(1, 2, 6, 8))
    rest = [0, 1, 2, 4, 5]
    expected = attention_mass(q, mx.array(k[:, :, rest]), 0.3)
    k[0, :, 3, 0] = value
    usable = mx.array(np.isfinite(k).all(axis=-1))
    got = np.array(attention_mass(q, mx.array(k), 0.3, usable=usable))
    assert (got[:, :, 3] == 0).all()
    np.testing.assert_allclose(got[:, :, rest], np.array(expected), atol=1e-6)


@pytest.mark.parametrize("kind", ["bool", "float", "lowest"])
@pytest.mark.parametrize("with_usable", [False, True])
def test_a_query_that_sees_no_row_gives_no_mass(kind: str, with_usable: bool) -> None:
    q, k = mx.random.normal((1, 2, 3, 4)), mx.random.normal((1, 1, 5, 4))
    seen = np.ones((1, 1, 3, 5), bool)
    seen[0, 0, 1] = False
    hidden = mx.finfo(mx.float32).min if kind == "lowest" else -mx.inf
    mask = mx.array(seen) if kind == "bool" else mx.where(mx.array(seen), 0.0, hidden)
    usable = mx.array([[[True, True, False, True, True]]]) if with_usable else None
    got = attention_mass(q, k, 0.5, mask, usable=usable, per_query=True)
    assert np.array(got.sum(axis=-1)).tolist() == [[[pytest.approx(2), 0, pytest.approx(2)]]]
    if with_usable:
        assert np.array(got)[..., 2].max() == 0
    for options in ({}, {"sinks": mx.array([0.0, 1.0]), "soft_cap": 5.0, "tau": 2.0, "weight": mx.ones(3)}):
        nobody = attention_mass(q, k, 0.5, None, usable=mx.zeros((1, 1, 5), mx.bool_), **options)
        assert nobody.tolist() == [[[0.0] * 5]]


@pytest.mark.parametrize(
    "options",
    [{}, {"tau": 2.0}, {"soft_cap": 20.0}, {"sinks": mx.zeros(4)}, {"noise": "gumbel"}, {"noise": "gaussian"}],
    ids=["plain", "tau", "soft cap", "sinks", "gumbel", "gaussian"],
)
def test_tiles_bound_the_memory(options: dict[str, Any]) -> None:
    """1024 queries over 4096 rows: all logits at once take 64 MB for 4 heads; tiles of 1 MB must stay far below."""
    q, k = mx.random.normal((1, 4, 1024, 16)), mx.random.normal((1, 2, 4096, 16))
    if arm := options.get("noise"):
        positions, asking = mx.broadcast_to(mx.arange(4096), (1, 2, 4096)), mx.arange(3072, 4096)[None]
        mx.eval(positions, asking)
        options = {"noise": LogitNoise(0, 0, positions, asking, arm)}
    mx.eval(q, k)
    for mask in (None, "causal"):
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(attention_mass(q, k, 0.25, mask, **options, tile_bytes=1 << 20))
        assert mx.get_peak_memory() - before < 6 << 20
