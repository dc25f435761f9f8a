"""Attention mass: the softmax weight each stored row receives from the model's queries, the raw material of a score."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from . import noise as _noise
from .policies import Policy

Mask = mx.array | str | None


class Asked(NamedTuple):
    """One attention call of the model, as the hook saw it."""

    queries: mx.array  # [B, Hq, S, D]
    scale: float
    mask: Mask
    sinks: mx.array | None  # [Hq]
    soft_cap: float | None

    def alike(self, other: "Asked") -> bool:
        """Whether another layer's call differs in numbers only."""
        if self.sinks is not None and other.sinks is not None and self.sinks.dtype != other.sinks.dtype:
            return False
        return (
            self.queries.shape == other.queries.shape
            and self.queries.dtype == other.queries.dtype
            and (self.sinks is None) == (other.sinks is None)
            and (self.scale, self.soft_cap) == (other.scale, other.soft_cap)
            and (self.mask is other.mask or (isinstance(self.mask, str) and self.mask == other.mask))
        )


@dataclass(frozen=True)
class LogitNoise:
    """Noise for the logits of one call: who asks (query positions) and who is asked (row positions)."""

    seed: int
    layer: int
    rows: mx.array  # [B, Hkv, n] int32, the position of each stored row
    queries: mx.array | None  # [B, S] int32, the position of each query; None: frozen per row
    distribution: str = "gumbel"  # as `keyformer.noise.draw` takes it


def starting_scores(keys: mx.array) -> mx.array:
    """[B, H, n] float32 of keys [B, H, n, D]: 0, or -inf for one with a NaN or infinite component."""
    return mx.where(mx.all(mx.isfinite(keys), axis=-1), 0.0, -mx.inf).astype(mx.float32)


def attention_mass(
    queries: mx.array,
    keys: mx.array,
    scale: float,
    mask: Mask = None,
    *,
    usable: mx.array | None = None,
    noise: LogitNoise | None = None,
    tau: mx.array | float = 1.0,
    weight: mx.array | None = None,
    sinks: mx.array | None = None,
    soft_cap: float | None = None,
    per_query: bool = False,
    tile_bytes: int = 1 << 28,
) -> mx.array:
    """Sum over queries and over the query heads of each KV head of softmax((q.k * scale [+ g]) / tau), in float32.

    Args:
        queries: [B, Hq, S, D], as the attention call saw them (rotated).
        keys: [B, Hkv, n, D], the rows the same call attended to.
        scale: the attention's scale.
        mask: that call's mask: None, "causal" (bottom-right: the last query sees every row), or a boolean or additive
            array that broadcasts to [B, Hq or 1, S, n].
        usable: [B, Hkv, n] boolean; rows that are False (padding, or a NaN or infinite key) get no mass and take none.
        noise: added to the logits, masked or not.
        tau: divides the logits (mask and noise included): one number, or [B, 1, 1, 1] float32. More than 0.
        weight: [S] or [B, S] float32, how much each query counts; None: all count 1.
        sinks: [Hq], one logit per query head that takes part in the softmax as a row would and whose mass nobody gets
            (gpt_oss). Neither scaled nor noised; divided by tau like the others.
        soft_cap: c: logits become c * tanh(logit / c), before mask and noise (gemma2).
        per_query: return [B, Hkv, S, n] instead of the sum over queries.
        tile_bytes: bound on one tile's float32 logits; queries are taken in tiles of this size.

    Returns:
        [B, Hkv, n] float32 (or [B, Hkv, S, n]), never NaN. A query with a NaN or infinite component gives no mass, and
        neither does a tile of queries with logits that leave float32.
    """
    B, Hq, S = queries.shape[:3]
    Hkv, n = keys.shape[1], keys.shape[2]
    keys = keys.astype(mx.float32)
    if usable is not None:
        keys = mx.where(usable[..., None], keys, 0.0)
    queries = queries.astype(mx.float32) * scale
    finite = mx.all(mx.isfinite(queries), axis=-1)
    queries = mx.where(finite[..., None], queries, 0.0)
    counts = finite.astype(mx.float32)
    if weight is not None:
        counts = counts * weight.reshape(-1, 1, S)
    if sinks is not None:
        sinks = sinks.astype(mx.float32).reshape(1, Hq, 1, 1)
    asked = _Asked(queries, keys, counts, mask, usable, noise, tau, sinks, soft_cap)
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
        part = _tile_mass(asked, first, last, seen, per_query)
        part = mx.where(mx.isnan(part), 0.0, part)  # finite numbers whose product is not
        part = mx.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, n - seen)]) if seen < n else part
        if per_query:
            parts.append(part)
        else:
            total = total + part
        if S > 1:
            mx.eval(part, total)
    return mx.concatenate(parts, axis=2) if per_query else total


@dataclass(frozen=True)
class _Asked:
    """The arguments of `attention_mass` as every tile needs them."""

    queries: mx.array  # float32, scaled, 0 where not finite
    keys: mx.array  # float32, 0 where not usable
    counts: mx.array  # [B, Hq, S] float32, what each query counts, 0 where not finite
    mask: Mask
    usable: mx.array | None
    noise: LogitNoise | None
    tau: mx.array | float
    sinks: mx.array | None  # [1, Hq, 1, 1] float32
    soft_cap: float | None


def _tile_mass(asked: _Asked, first: int, last: int, seen: int, per_query: bool) -> mx.array:
    """Mass of queries first..last over rows 0..seen: [B, Hkv, seen] or [B, Hkv, last - first, seen]."""
    queries, keys, mask = asked.queries, asked.keys, asked.mask
    B, Hq, S, D = queries.shape
    Hkv, n = keys.shape[1], keys.shape[2]
    G, T = Hq // Hkv, last - first
    q = queries[:, :, first:last].reshape(B, Hkv, G * T, D)
    logits = (q @ keys[:, :, :seen].swapaxes(-1, -2)).reshape(B, Hkv, G, T, seen)
    if asked.soft_cap is not None:
        logits = asked.soft_cap * mx.tanh(logits / asked.soft_cap)
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
    if asked.usable is not None:
        rows = asked.usable[:, :, None, None, :seen]
        allowed = rows if allowed is None else allowed & rows
    if asked.noise is not None:
        noise = asked.noise
        heads = mx.arange(Hq).reshape(1, Hkv, G, 1, 1)
        asking = None if noise.queries is None else noise.queries[:, None, None, first:last, None]
        rows = noise.rows[:, :, None, None, :seen]
        logits = logits + _noise.draw(noise.distribution, noise.seed, noise.layer, heads, rows, asking)
    tau = asked.tau
    if isinstance(tau, mx.array):
        logits = logits / tau[..., None]
    elif tau != 1:
        logits = logits / tau
    if allowed is not None:
        logits = mx.where(allowed, logits, mx.finfo(mx.float32).min)
    p = mx.softmax(logits, axis=-1)
    counts = asked.counts[:, :, first:last].reshape(B, Hkv, G, T)
    if allowed is not None:
        # the softmax of a query that sees no row at all is uniform: it must not count
        counts = mx.where(mx.any(allowed, axis=-1), counts, 0.0)
    if asked.sinks is not None:
        # softmax over rows and sink = softmax over rows times the rows' share: exp(all) / (exp(all) + exp(sink))
        sinks = (asked.sinks / tau).reshape(-1, Hkv, G, 1)
        share = mx.sigmoid(mx.logsumexp(logits, axis=-1) - sinks)
        counts = counts * share
    if per_query:
        return (p * counts[..., None]).sum(axis=2)
    return (counts.reshape(B, Hkv, 1, G * T) @ p.reshape(B, Hkv, G * T, seen))[:, :, 0]


def add_query_mass(
    policy: Policy,
    layer: int,
    keys: mx.array,
    scores: mx.array,
    positions: mx.array,
    masses: mx.array | None,
    stored: mx.array,
    offsets: list[int],
    tau: mx.array | float,
    asked: Asked,
    tile_bytes: int,
    buffer: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """The scores, and with a window the masses, after one attention call.

    Args:
        policy: its choices; one that ranks by queries.
        layer: index of the layer, a coordinate of the noise.
        keys: [B, H, n, D], what attention read; H is Hkv, or a multiple where the layer expanded its keys.
        scores, positions: [B, Hkv, capacity] float32 and int32; -inf is the score of a key that is not finite.
        masses: [B, Hkv, capacity, window] float32, one column per counted query; None without a window.
        stored: [B, 1, n] boolean, which rows exist.
        offsets: of each sequence: tokens seen, the call's own included.
        tau: the temperature: one number, or [B, 1, 1, 1] float32.
        asked: the call.
        tile_bytes: as in `attention_mass`.
        buffer: [B, Hkv, m, D], the array that `keys` is the beginning of, so that no kernel copies it.
    """
    from .kernels.prefill import prompt_mass  # whose definition is in this module

    p = policy
    queries, mask = asked.queries, asked.mask
    S, n = queries.shape[2], stored.shape[-1]
    if 0 < p.window < S:
        # only the last queries count; they keep their place at the bottom right of a causal mask
        queries = queries[:, :, S - p.window :]
        mask = mask[..., S - p.window :, :] if isinstance(mask, mx.array) and mask.shape[-2] == S else mask
        S = p.window
    # multi-head latent attention expands the rows it stores once into keys of every head
    expanded = keys.shape[1] // scores.shape[1]
    logit_noise = None
    if p.noise == "logit":
        asking = mx.array([list(range(o - S, o)) for o in offsets], mx.int32) if p.redraw else None
        rows = positions[..., :n]
        rows = mx.repeat(rows, expanded, axis=1) if expanded > 1 else rows
        logit_noise = LogitNoise(p.seed, layer, rows, asking, p.distribution)
    usable = (scores[..., :n] != -mx.inf) & stored
    call: dict[str, Any] = {
        "usable": mx.repeat(usable, expanded, axis=1) if expanded > 1 else usable,
        "noise": logit_noise,
        "tau": 1.0 if p.noise == "select" else tau,
        "weight": _ages(p.decay, S) if p.decay < 1 and S > 1 else None,
        "sinks": asked.sinks,
        "soft_cap": asked.soft_cap,
        "tile_bytes": tile_bytes,
    }
    if S > 1 and not p.window:
        mass = prompt_mass(queries, keys, asked.scale, mask, buffer=buffer, **call)
    else:
        mass = attention_mass(queries, keys, asked.scale, mask, per_query=bool(p.window), **call)
    if expanded > 1:
        mass = mass.reshape(mass.shape[0], -1, expanded, *mass.shape[2:]).sum(axis=2)
    if p.window:
        assert masses is not None
        mass = mx.pad(mass.swapaxes(2, 3), [(0, 0), (0, 0), (0, masses.shape[2] - n), (0, 0)])
        masses = mx.concatenate([masses[..., S:], mass], axis=3)
        return mx.where(scores == -mx.inf, -mx.inf, masses.sum(axis=3)), masses
    # a score of -inf, times a number that float32 knows from 0, stays what it is
    before = scores[..., :n] if p.decay == 1 else scores[..., :n] * max(p.decay**S, 1e-37)
    if n == scores.shape[2]:
        return before + mass, masses
    after = scores[...]
    after[..., :n] = before + mass
    return after, masses


def _ages(decay: float, S: int) -> mx.array:
    """[S] float32, what each of S queries counts: decay**age, the last one's age 0."""
    # not `**`: the float32 of a decay near 1, to the power 2000, is off by 3e-5, and differs from chunk to chunk
    return mx.exp(math.log(decay) * mx.arange(S - 1, -1, -1, dtype=mx.float32))
