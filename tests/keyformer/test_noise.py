"""The noise: the documented integers, their distribution, their independence, and the temperature."""

from __future__ import annotations

import math
import random

import mlx.core as mx
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyformer import noise

SEEDS = (0, 1, 2**32 - 1, 2**32, 2**64 - 1)


ARMS = ("gumbel", "gaussian", "constant")


def draws(
    seed: int = 0,
    layer: int = 0,
    head: int = 0,
    count: int = 20_000,
    query: int | None = None,
    distribution: str = "gumbel",
) -> np.ndarray:
    asking = None if query is None else mx.array(query)
    return np.array(noise.draw(distribution, seed, layer, mx.array(head), mx.arange(count), asking))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.one_of(st.sampled_from(SEEDS), st.integers(0, 2**64 - 1)),
    layer=st.integers(0, 200),
    head=st.integers(0, 128),
    position=st.integers(0, 2**31 - 1),
    query=st.one_of(st.none(), st.integers(0, 2**31 - 1)),
)
def test_the_hash_is_the_documented_one(seed: int, layer: int, head: int, position: int, query: int | None) -> None:
    asking = None if query is None else mx.array(query)
    got = noise.uniform(seed, layer, mx.array(head), mx.array(position), asking).item()
    assert got == oracle.uniform(oracle.hashed(seed, layer, head, position, query))  # exact: 24 bits
    expected = oracle.gumbel(seed, layer, head, position, query)
    drawn = noise.gumbel(seed, layer, mx.array(head), mx.array(position), asking).item()
    assert drawn == pytest.approx(expected, rel=2e-6, abs=2e-6)
    for arm in ARMS:
        drawn = noise.draw(arm, seed, layer, mx.array(head), mx.array(position), asking).item()
        assert drawn == pytest.approx(oracle.draw(arm, seed, layer, head, position, query), rel=2e-6, abs=2e-6)


@pytest.mark.parametrize("query", [None, 7])
def test_mean_and_deviation_are_gumbels(query: int | None) -> None:
    g = draws(count=100_000, query=query)
    assert g.dtype == np.float32
    assert g.mean() == pytest.approx(0.5772, abs=4 * 1.2825 / math.sqrt(1e5))
    assert g.std() == pytest.approx(1.2825, abs=0.015)


def normal(x: np.ndarray) -> np.ndarray:
    """Distribution function of the normal arm."""
    z = (x.astype(np.float64) - oracle.MEAN) / (oracle.DEVIATION * math.sqrt(2))
    return np.array([0.5 * (1 + math.erf(v)) for v in z])


def gumbels(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.exp(-x.astype(np.float64)))


@pytest.mark.parametrize("query", [None, 7])
def test_each_arm_has_its_shape_and_the_two_have_one_mean_and_deviation(query: int | None) -> None:
    """Kolmogorov's distance to its own distribution and to the other; 1 sample in 1000 is farther than 1.95/sqrt(n)."""
    n = 50_000
    shapes = {"gumbel": gumbels, "gaussian": normal}
    steps = np.arange(1, n + 1) / n
    for arm, own in shapes.items():
        g = np.sort(draws(count=n, query=query, distribution=arm))
        assert g.dtype == np.float32
        assert g.mean() == pytest.approx(0.5772, abs=4 * 1.2825 / math.sqrt(n))
        assert g.std() == pytest.approx(1.2825, abs=0.025)
        for other, function in shapes.items():
            distance = np.abs(function(g) - steps).max()
            assert (distance < 1.95 / math.sqrt(n)) == (function is own), (arm, other, distance)
    # skewness of the Gumbel distribution is 1.14, of the normal one 0
    skew = [((g - g.mean()) ** 3).mean() / g.std() ** 3 for g in (draws(count=n, distribution=a) for a in shapes)]
    assert skew == [pytest.approx(1.14, abs=0.1), pytest.approx(0, abs=0.05)]


def test_gumbel_and_gaussian_grow_with_the_same_number() -> None:
    a, b = (draws(count=20_000, distribution=arm) for arm in ("gumbel", "gaussian"))
    order = np.argsort(a, kind="stable")
    assert (np.diff(b[order]) >= 0).all()


def test_a_constant_has_the_shape_of_the_others() -> None:
    heads, positions, queries = mx.arange(3)[:, None, None], mx.arange(5), mx.arange(4)[:, None]
    for asking in (None, queries):
        drawn = [noise.draw(arm, 1, 2, heads, positions, asking) for arm in ARMS]
        assert {d.shape for d in drawn} == {(3, 1 if asking is None else 4, 5)}
        assert {d.dtype for d in drawn} == {mx.float32}
        assert np.unique(np.array(drawn[2])).tolist() == [np.float32(0.5772156649)]
    with pytest.raises(ValueError, match="distribution: expected 'gumbel', 'gaussian' or 'constant', got 'normal'"):
        noise.draw("normal", 1, 2, heads, positions)


def unmix(h: int) -> int:
    """The integer that oracle.mix takes to h."""
    h ^= h >> 16
    h = h * pow(0xC2B2AE35, -1, 2**32) & oracle.WORD
    h ^= h >> 13 ^ h >> 26
    h = h * pow(0x85EBCA6B, -1, 2**32) & oracle.WORD
    return h ^ h >> 16


def position_of(target: int, seed: int, layer: int, head: int) -> int:
    """The position at which the frozen noise of this stream comes from the 32 bits `target`."""
    stream = 0
    for word in (seed & oracle.WORD, seed >> 32, (layer + 1) * 0x9E3779B1):
        stream = oracle.mix(stream + word + 1 & oracle.WORD)
    stream = oracle.mix(stream + head * 0x85EBCA77 & oracle.WORD)
    inner = unmix(target) - oracle.mix(stream ^ 0x27D4EB2F) & oracle.WORD
    return (unmix(inner) - stream) * pow(0xC2B2AE3D, -1, 2**32) & oracle.WORD


@pytest.mark.parametrize("target", [0, 1, 511, 512, 0x80000000, 0xFFFFFE00, 0xFFFFFFFF])
def test_extreme_hashes_stay_strictly_inside_and_finite(target: int) -> None:
    position = position_of(target, seed=3, layer=2, head=1)
    assert oracle.hashed(3, 2, 1, position) == target
    at = mx.array(position, mx.uint32)
    u = noise.uniform(3, 2, mx.array(1), at).item()
    assert 0 < u < 1
    assert u == oracle.uniform(target)
    g = noise.gumbel(3, 2, mx.array(1), at).item()
    assert math.isfinite(g)
    assert -2.9 < g < 17
    g = noise.gaussian(3, 2, mx.array(1), at).item()
    assert math.isfinite(g)
    assert abs(g - oracle.MEAN) < 5.5 * oracle.DEVIATION


COORDINATES = [
    {"seed": 1},
    {"seed": 2**32},
    {"seed": 2**63},
    {"layer": 1},
    {"layer": 31},
    {"head": 1},
    {"head": 8},
    {"query": 0},
    {"query": 1},
    {"seed": 1, "layer": 1, "head": 1},
]


def correlations(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Correlation of a with b at every cyclic shift."""
    a, b = (a - a.mean()) / a.std(), (b - b.mean()) / b.std()
    return np.fft.irfft(np.fft.rfft(a) * np.conj(np.fft.rfft(b)), len(a)) / len(a)


@pytest.mark.parametrize("other", COORDINATES, ids=str)
def test_streams_are_uncorrelated_at_any_shift(other: dict[str, int]) -> None:
    n = 1 << 14
    found = np.abs(correlations(draws(count=n), draws(count=n, **other)))
    # of 16384 correlations with deviation 1/128 the largest is near 4.2 / 128; a copy shifted by k has 1 - k/n
    assert found.max() < 6.5 / 128


def test_queries_of_one_stream_are_uncorrelated_at_any_shift() -> None:
    n = 1 << 14
    for a, b in ((0, 1), (5, 6), (1, 2**20)):
        assert np.abs(correlations(draws(count=n, query=a), draws(count=n, query=b))).max() < 6.5 / 128
    along = [np.array(noise.gumbel(0, 0, mx.array(0), mx.array(p), mx.arange(n))) for p in (0, 1)]
    assert np.abs(correlations(*along)).max() < 6.5 / 128


def test_no_head_of_a_model_is_another_one_shifted() -> None:
    """Two streams that start close to each other on one long cycle would be copies shifted by a few positions."""
    layers, heads, n = 64, 64, 256
    g = np.concatenate([np.array(noise.uniform(0, x, mx.arange(heads)[:, None], mx.arange(n))) for x in range(layers)])
    bits = (g * 2**23).astype(np.uint64)
    triples = bits[:, :-2] << 41 | bits[:, 1:-1] << 18 | bits[:, 2:] >> 5  # three neighbours, 64 bits
    assert len(np.unique(triples)) == triples.size
    # the same for the one pair of this seed, found by search, whose first hashes lie 107 positions apart
    a, b = g[31 * heads + 51], g[4 * heads + 61]
    assert not np.isin(a, b).all()
    assert abs(np.corrcoef(a[107:], b[:-107])[0, 1]) < 0.3


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(1, 40), st.integers(1, 12), st.data())
def test_any_part_has_the_numbers_of_the_whole(seed: int, layer: int, n: int, S: int, data: st.DataObject) -> None:
    heads, positions, queries = mx.arange(5).reshape(5, 1, 1), mx.arange(n), mx.arange(S)[:, None]
    whole = np.array(noise.gumbel(seed, layer, heads, positions, queries))
    assert whole.shape == (5, S, n)
    a, b = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
    c, d = sorted(data.draw(st.tuples(st.integers(0, S), st.integers(0, S))))
    part = np.array(noise.gumbel(seed, layer, heads[2:4], positions[a:b], queries[c:d]))
    assert (part == whole[2:4, c:d, a:b]).all()
    order = data.draw(st.permutations(range(n)))
    shuffled = np.array(noise.gumbel(seed, layer, heads, mx.array(list(order))[None], queries))
    assert (shuffled == whole[..., list(order)]).all()


def test_it_leaves_the_global_generator_alone() -> None:
    mx.random.seed(5)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(5)
    mx.eval(noise.gumbel(random.randrange(2**32), 0, mx.array(0), mx.arange(100)))
    assert mx.random.uniform(shape=(4,)).tolist() == expected


@pytest.mark.parametrize(
    ("step", "schedule", "expected"),
    [(0, (1, 2, 4), 1.0), (1, (1, 2, 4), 1.25), (4, (1, 2, 4), 2.0), (9, (1, 2, 4), 2.0), (9, (1.5, 7, 0), 1.5)],
)
def test_temperature(step: int, schedule: tuple[float, float, int], expected: float) -> None:
    assert noise.temperature(step, *schedule) == expected
    assert oracle.temperature(step, *schedule) == expected


def test_layers_drawn_together_have_the_noise_of_each() -> None:
    positions = mx.arange(3 * 2 * 5).reshape(3, 2, 5) * 7 % 11
    heads = mx.arange(2)[:, None]
    together = noise.draw("gumbel", 5, [4, 0, 9], heads, positions)
    for i, layer in enumerate([4, 0, 9]):
        assert mx.array_equal(together[i], noise.draw("gumbel", 5, layer, heads, positions[i]))


def test_temperatures_are_those_of_each_step() -> None:
    steps = noise.temperatures(3, 4, 1.0, 2.0, 5)
    assert steps == tuple(noise.temperature(step, 1.0, 2.0, 5) for step in (3, 4, 5, 6))
