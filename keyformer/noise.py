"""Noise as a pure function of integers, and the temperature schedule.

No state and no global random generator: the noise of a row depends on (seed, layer, head, position[, query]) alone,
so it does not change with chunk sizes, batch rows or a resumed run. 32-bit integer arithmetic only, so that a GPU
kernel computes the same integers.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

MEAN, DEVIATION = 0.5772156649015329, math.pi / math.sqrt(6)  # of the standard Gumbel distribution

_LAYER, _HEAD, _POSITION, _QUERY = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F
_MASK = 0xFFFFFFFF


@lru_cache
def _word(number: int) -> mx.array:
    """A uint32, made once: on a GPU, each new one would have to find its way there."""
    return mx.array(number, mx.uint32)


def _mix(h: mx.array) -> mx.array:
    """MurmurHash3's 32-bit finaliser: a bijection in which every input bit reaches every output bit."""
    h = (h ^ (h >> 16)) * _word(0x85EBCA6B)
    h = (h ^ (h >> 13)) * _word(0xC2B2AE35)
    return h ^ (h >> 16)


def stream(seed: int, layer: int) -> int:
    """The well-mixed 32 bits of a seed and a layer, from which every head's stream comes. A seed of more than 32 bits
    is folded in word by word."""
    h = 0
    for word in (seed & _MASK, (seed >> 32) & _MASK, (layer + 1) * _LAYER & _MASK):
        h = (h + word + 1) & _MASK
        h = (h ^ (h >> 16)) * 0x85EBCA6B & _MASK
        h = (h ^ (h >> 13)) * 0xC2B2AE35 & _MASK
        h ^= h >> 16
    return h


def _stream(seed: int, layer: int | Sequence[int], heads: mx.array) -> mx.array:
    """One well-mixed uint32 per head."""
    if isinstance(layer, int):
        h = mx.array(stream(seed, layer), mx.uint32)
    else:
        h = mx.array([stream(seed, one) for one in layer], mx.uint32).reshape(-1, *[1] * heads.ndim)
    return _mix(h + heads.astype(mx.uint32) * _word(_HEAD))


def uniform(
    seed: int, layer: int | Sequence[int], heads: mx.array, positions: mx.array, queries: mx.array | None = None
) -> mx.array:
    """Uniform numbers strictly inside (0, 1), float32: one per broadcast element of heads, positions and queries.

    Args:
        seed: any integer in [0, 2**64).
        layer: index of the model's layer; of several, `positions` has one entry each on an axis before the heads'.
        heads, positions, queries: integer arrays that broadcast together; `queries` (the position of the asking query)
            makes the noise redrawn per (query, row) instead of frozen per row.
    """
    return _uniform(_stream(seed, layer, heads), positions, queries)


def _uniform(head: mx.array, positions: mx.array, queries: mx.array | None = None) -> mx.array:
    h = _mix(head + positions.astype(mx.uint32) * _word(_POSITION))
    if queries is not None:
        h = _mix(h + _mix(head ^ (queries.astype(mx.uint32) * _word(_QUERY) + 1)))
    else:
        # the stream comes in a second time: so far, any stream is any other one shifted by some number of positions
        h = _mix(h + _mix(head ^ _word(_QUERY)))
    # 23 bits and a half: the largest value, 1 - 2**-24, is exact in float32, so no logarithm below meets 0 or 1
    return ((h >> 9).astype(mx.float32) + 0.5) * (2.0**-23)


def gumbel(
    seed: int, layer: int | Sequence[int], heads: mx.array, positions: mx.array, queries: mx.array | None = None
) -> mx.array:
    """Standard Gumbel noise -log(-log(u)), float32: mean 0.5772, standard deviation 1.2825; arguments of `uniform`."""
    return -mx.log(-mx.log(uniform(seed, layer, heads, positions, queries)))


def gumbel_of_streams(streams: mx.array, positions: mx.array) -> mx.array:
    """[R, n] float32: `gumbel(seed, 0, 0, positions [n])` of R seeds at once, given `stream(seed, 0)` [R] uint32."""
    return -mx.log(-mx.log(_uniform(_mix(streams)[:, None], positions)))


def gaussian(
    seed: int, layer: int | Sequence[int], heads: mx.array, positions: mx.array, queries: mx.array | None = None
) -> mx.array:
    """Normal noise with the mean and standard deviation of `gumbel`, float32, by the inverse distribution function.

    It grows with the same uniform number as `gumbel` does, so the two differ in shape alone. Arguments of `uniform`.
    """
    u = uniform(seed, layer, heads, positions, queries)
    return MEAN + (DEVIATION * math.sqrt(2)) * mx.erfinv(2 * u - 1)  # 2u - 1 is exact and strictly inside (-1, 1)


def draw(
    distribution: str,
    seed: int,
    layer: int | Sequence[int],
    heads: mx.array,
    positions: mx.array,
    queries: mx.array | None = None,
) -> mx.array:
    """Noise of a distribution: "gumbel", "gaussian", or "constant" (their mean for every element), float32.

    The other arguments are those of `uniform`; a constant depends on their shapes alone.
    """
    if distribution == "gumbel":
        return gumbel(seed, layer, heads, positions, queries)
    if distribution == "gaussian":
        return gaussian(seed, layer, heads, positions, queries)
    if distribution == "constant":
        coordinates = [a.shape for a in (heads, positions, queries) if a is not None]
        return mx.full(mx.broadcast_shapes(*coordinates), MEAN, mx.float32)
    raise ValueError(f"distribution: expected 'gumbel', 'gaussian' or 'constant', got {distribution!r}.")


def temperature(step: int, tau_init: float, tau_end: float, anneal_steps: int) -> float:
    """tau_init + min(step, T) * (tau_end - tau_init) / T, T = anneal_steps (Keyformer, eq. 10); tau_init if T = 0."""
    if anneal_steps == 0:
        return tau_init
    return tau_init + min(step, anneal_steps) * (tau_end - tau_init) / anneal_steps


@lru_cache(maxsize=64)
def temperatures(first: int, count: int, tau_init: float, tau_end: float, anneal_steps: int) -> tuple[float, ...]:
    """`temperature` of `count` steps from `first` on; remembered, as every layer asks for those of a chunk."""
    return tuple(temperature(step, tau_init, tau_end, anneal_steps) for step in range(first, first + count))
