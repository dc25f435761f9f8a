"""Attention mass against the float64 oracle: shapes, dtypes, masks, unusable rows, noise, tiles."""

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
        "tau": draw(st.sampled_from([1.0, 0.5, [1.0, 1.5, 2.0][:B]])),
        "allowed": allowed,
        "added": added,
    }


def expected_and_noise(call: dict[str, Any]) -> tuple[np.ndarray, LogitNoise | None]:
    """The oracle's mass of every query, and the same noise as our function takes it."""
    B, Hq, S, _ = call["queries"].shape
    Hkv, n = call["keys"].shape[1:3]
    q, k = as_float64(call["queries"]), as_float64(call["keys"])
    if call["noise"] == "none":
        return oracle.mass(q, k, call["scale"], call["allowed"], call["added"]), None
    rows = np.arange(B * Hkv * n).reshape(B, Hkv, n) * 3 % 101  # positions in no order, different in each head
    asking = None if call["noise"] == "frozen" else np.arange(B * S).reshape(B, S) + 40
    g = np.zeros((B, Hq, S, n))
    for b, h, i, r in np.ndindex(g.shape):
        query = None if asking is None else int(asking[b, i])
        g[b, h, i, r] = oracle.gumbel(9, 4, h, int(rows[b, h * Hkv // Hq, r]), query)
    tau = call["tau"]
    taus = [tau] * B if isinstance(tau, float) else tau
    each = [
        oracle.mass(
            q[b : b + 1], k[b : b + 1], call["scale"], *(call[x][b : b + 1] for x in ("allowed", "added")), *more
        )
        for b, more in enumerate(zip([g[b : b + 1] for b in range(B)], taus, strict=True))
    ]
    given_noise = LogitNoise(
        9,
        4,
        mx.array(rows.astype(np.int32)),
        None if asking is None else mx.array(asking.astype(np.int32)),
        tau if isinstance(tau, float) else mx.array(tau, mx.float32)[:, None, None, None],
    )
    return np.concatenate(each), given_noise


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls(), st.integers(1, 4000))
def test_against_the_oracle(call: dict[str, Any], tile_bytes: int) -> None:
    expected, noise = expected_and_noise(call)
    arguments = (call["queries"], call["keys"], call["scale"], call["mask"])
    usable = call["usable"]
    each = attention_mass(*arguments, usable=usable, noise=noise, per_query=True)
    assert each.dtype == mx.float32
    np.testing.assert_allclose(np.array(each), expected, atol=3e-6)
    total = attention_mass(*arguments, usable=usable, noise=noise)
    assert total.dtype == mx.float32
    np.testing.assert_allclose(np.array(total), expected.sum(axis=2), atol=1e-5)
    # mass is conserved: one per query head and query that sees a row
    asking = call["allowed"].any(axis=-1).sum()
    assert total.sum().item() == pytest.approx(asking, abs=1e-3)
    # tiles change nothing
    for per_query, whole in ((False, total), (True, each)):
        tiled = attention_mass(*arguments, usable=usable, noise=noise, per_query=per_query, tile_bytes=tile_bytes)
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
    nobody = attention_mass(q, k, 0.5, None, usable=mx.zeros((1, 1, 5), mx.bool_))
    assert nobody.tolist() == [[[0.0] * 5]]


def test_tiles_bound_the_memory() -> None:
    """1024 queries over 4096 rows: all logits at once take 64 MB for 4 heads; tiles of 1 MB must stay far below."""
    q, k = mx.random.normal((1, 4, 1024, 16)), mx.random.normal((1, 2, 4096, 16))
    mx.eval(q, k)
    for mask in (None, "causal"):
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(attention_mass(q, k, 0.25, mask, tile_bytes=1 << 20))
        assert mx.get_peak_memory() - before < 6 << 20
