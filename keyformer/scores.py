"""Attention mass: the softmax weight each stored row receives from the model's queries, the raw material of a score."""

from dataclasses import dataclass

import mlx.core as mx

from . import noise as _noise

Mask = mx.array | str | None


@dataclass(frozen=True)
class LogitNoise:
    """Gumbel noise for the logits of one call: who asks (query positions) and who is asked (row positions)."""

    seed: int
    layer: int
    rows: mx.array  # [B, Hkv, n] int32, the position of each stored row
    queries: mx.array | None  # [B, S] int32, the position of each query; None: frozen per row
    tau: mx.array | float  # [B, 1, 1, 1] float32, or one number for all


def attention_mass(
    queries: mx.array,
    keys: mx.array,
    scale: float,
    mask: Mask = None,
    *,
    usable: mx.array | None = None,
    noise: LogitNoise | None = None,
    per_query: bool = False,
    tile_bytes: int = 1 << 28,
) -> mx.array:
    """Sum over queries and over the query heads of each KV head of softmax((q.k * scale [+ g]) [/ tau]), in float32.

    Args:
        queries: [B, Hq, S, D], as the attention call saw them (rotated).
        keys: [B, Hkv, n, D], the rows the same call attended to.
        scale: the attention's scale.
        mask: that call's mask: None, "causal" (bottom-right: the last query sees every row), or a boolean or additive
            array that broadcasts to [B, Hq or 1, S, n].
        usable: [B, Hkv, n] boolean; rows that are False (padding, or a NaN or infinite key) get no mass and take none.
        noise: Gumbel noise on the logits.
        per_query: return [B, Hkv, S, n] instead of the sum over queries.
        tile_bytes: bound on one tile's float32 logits; queries are taken in tiles of this size.

    Returns:
        [B, Hkv, n] float32 (or [B, Hkv, S, n]). A query with a NaN or infinite component gives no mass.
    """
    B, Hq, S = queries.shape[:3]
    Hkv, n = keys.shape[1], keys.shape[2]
    keys = keys.astype(mx.float32)
    if usable is not None:
        keys = mx.where(usable[..., None], keys, 0.0)
    queries = queries.astype(mx.float32) * scale
    weight = mx.all(mx.isfinite(queries), axis=-1)
    queries = mx.where(weight[..., None], queries, 0.0)
    # logits and their softmax live at once, and noise needs a hash and its logarithms beside them
    tile = max(1, tile_bytes // (B * Hq * n * 4 * (5 if noise else 3)))
    if isinstance(mask, str):
        # under a causal mask early queries see few rows: short tiles skip the rows none of their queries sees
        tile = min(tile, 64)
    parts = []
    total = mx.zeros((B, Hkv, n), mx.float32)
    for first in range(0, S, tile):
        last = min(first + tile, S)
        seen = n - S + last if isinstance(mask, str) else n
        part = _tile_mass(queries, keys, weight, mask, usable, noise, first, last, seen, per_query)
        part = mx.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, n - seen)]) if seen < n else part
        if per_query:
            parts.append(part)
        else:
            total = total + part
        if S > 1:
            mx.eval(part, total)
    return mx.concatenate(parts, axis=2) if per_query else total


def _tile_mass(
    queries: mx.array,
    keys: mx.array,
    weight: mx.array,
    mask: Mask,
    usable: mx.array | None,
    noise: LogitNoise | None,
    first: int,
    last: int,
    seen: int,
    per_query: bool,
) -> mx.array:
    """Mass of queries first..last over rows 0..seen: [B, Hkv, seen] or [B, Hkv, last - first, seen]."""
    B, Hq, S, D = queries.shape
    Hkv, n = keys.shape[1], keys.shape[2]
    G, T = Hq // Hkv, last - first
    q = queries[:, :, first:last].reshape(B, Hkv, G * T, D)
    logits = (q @ keys[:, :, :seen].swapaxes(-1, -2)).reshape(B, Hkv, G, T, seen)
    allowed = None
    if isinstance(mask, str):
        allowed = (mx.arange(first, last)[:, None] + (n - S)) >= mx.arange(seen)[None]
        allowed = allowed[None, None, None]
    elif mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        mask = mx.broadcast_to(mask, (B, mask.shape[1], S, n))[:, :, first:last, :seen]
        mask = mask.reshape(B, Hkv, G, T, seen) if mask.shape[1] == Hq else mask[:, :, None]
        if mask.dtype == mx.bool_:
            allowed = mask
        else:
            allowed = mask > mx.finfo(mask.dtype).min  # -inf, or the lowest number there is, hides a row
            logits = logits + mask.astype(mx.float32)
    if usable is not None:
        rows = usable[:, :, None, None, :seen]
        allowed = rows if allowed is None else allowed & rows
    if noise is not None:
        heads = mx.arange(Hq).reshape(1, Hkv, G, 1, 1)
        asking = None if noise.queries is None else noise.queries[:, None, None, first:last, None]
        g = _noise.gumbel(noise.seed, noise.layer, heads, noise.rows[:, :, None, None, :seen], asking)
        tau = noise.tau[..., None] if isinstance(noise.tau, mx.array) else noise.tau
        logits = (logits + g) / tau
    if allowed is not None:
        logits = mx.where(allowed, logits, mx.finfo(mx.float32).min)
    p = mx.softmax(logits, axis=-1)
    w = weight[:, :, first:last].reshape(B, Hkv, G, T)
    if allowed is not None:
        w = w & mx.any(allowed, axis=-1)  # the softmax of a query that sees no row at all is uniform: it must not count
    w = w.astype(mx.float32)
    if per_query:
        return (p * w[..., None]).sum(axis=2)
    return (w.reshape(B, Hkv, 1, G * T) @ p.reshape(B, Hkv, G * T, seen))[:, :, 0]
