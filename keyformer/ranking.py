"""From what a cache has stored to what a decision compares: one number per row, higher is kept."""

import math

import mlx.core as mx

from . import noise
from .policies import Policy

_FAR = 2**31 - 1


def rank_rows(
    policy: Policy,
    layer: int,
    scores: mx.array,
    positions: mx.array,
    keys: mx.array,
    stored: mx.array,
    offset: mx.array | int,
    tau: mx.array | float,
) -> mx.array:
    """The rank of each stored row, whatever the order of the rows.

    By attention: "query" and "key" rank by the accumulated scores, divided by how many queries could see the row
    (normalize "count"), then averaged over temporal neighbours (pooling); "norm" ranks by -||k||; "difference" by
    -cos(k, m), m the mean of k / ||k|| over the stored rows; "none" ranks all alike. Noise "select" adds tau * g last.

    Args:
        policy: the choices.
        layer: index of the layer, a coordinate of the noise.
        scores: [B, H, n] float32, as accumulated, none NaN; -inf marks a key with a NaN or infinite component.
        positions: [B, H, n] int32, where in the sequence each row came from.
        keys: [B, H, n, D], as attention reads them, of any float dtype.
        stored: [B, H or 1, n] boolean, which rows exist. The others have no influence.
        offset: tokens seen: an int, or [B, 1, 1] int32.
        tau: temperature of noise "select": a number, or [B, 1, 1] float32.

    Returns:
        [B, H, n] float32; -inf (lowest) for rows with such a key, some number for rows that do not exist, never NaN.
    """
    bad = scores == -mx.inf
    if policy.attention == "norm":
        rank = mx.where(stored & ~bad, -_length(keys.astype(mx.float32)), -mx.inf)
    elif policy.attention == "difference":
        rank = mx.where(bad, -mx.inf, -_cosine(keys, stored & ~bad))
    elif policy.attention == "none":
        rank = mx.where(bad, -mx.inf, 0.0)
    else:
        rank = scores
        if policy.normalize == "count":
            rank = rank / _counted(policy, offset - positions)
        if policy.pooling > 1:
            rank = mx.where(bad, -mx.inf, _pooled(rank, positions, stored & ~bad, policy.pooling))
    if policy.noise == "select" and (isinstance(tau, mx.array) or tau != 0):
        heads = mx.arange(positions.shape[1])[:, None]
        rank = rank + tau * noise.draw(policy.distribution, policy.seed, layer, heads, positions)
    return rank


def _counted(policy: Policy, queries: mx.array) -> mx.array:
    """What a row's score could have come from: of the `queries` that came since the row, how many count, float32.

    With a decay a the last one counts 1, the one before a, and so on: (1 - a**m) / (1 - a) for m queries.
    """
    queries = mx.maximum(queries, 1)  # a row that exists has seen its own query
    if policy.window:
        queries = mx.minimum(queries, policy.window)
    count = queries.astype(mx.float32)
    if policy.decay < 1:
        count = -mx.expm1(count * math.log(policy.decay)) / (1 - policy.decay)
    return count


def _pooled(scores: mx.array, positions: mx.array, usable: mx.array, width: int) -> mx.array:
    """Each score averaged over the `width` usable rows around it in temporal order, fewer at the ends."""
    order = mx.argsort(mx.where(usable, positions, _FAR), axis=-1)  # usable rows first
    n, half = scores.shape[-1], width // 2
    around = [(0, 0)] * (scores.ndim - 1) + [(half, half)]
    there = mx.pad(mx.take_along_axis(usable, order, axis=-1).astype(mx.float32), around)
    ordered = mx.pad(mx.take_along_axis(mx.where(usable, scores, 0.0), order, axis=-1), around)
    total, count = mx.zeros_like(scores), mx.zeros_like(scores)
    for shift in range(width):
        total = total + ordered[..., shift : shift + n]
        count = count + there[..., shift : shift + n]
    back = mx.argsort(order, axis=-1)
    return mx.take_along_axis(total / mx.maximum(count, 1.0), back, axis=-1)


def _length(keys: mx.array) -> mx.array:
    """[B, H, n]: Euclidean norm of float32 keys; infinite beyond 1e19, whose square leaves float32."""
    return mx.sqrt((keys * keys).sum(axis=-1))


def _cosine(keys: mx.array, usable: mx.array) -> mx.array:
    """[B, H, n]: cosine of each usable key with the mean of their directions; 0 where one of the two has none."""
    keys = mx.where(usable[..., None], keys.astype(mx.float32), 0.0)
    length = _length(keys)
    inverse = mx.where(length > 0, 1 / length, 0.0)
    mean = (inverse[..., None, :] @ keys)[..., 0, :]  # the sum points where the mean does
    size = _length(mean)[..., None]
    mean = mx.where(size > 0, mean / size, 0.0)
    return (keys @ mean[..., None])[..., 0] * inverse
