"""Which row goes: the definition, in float32 array operations.

Every function takes `rank` (higher is kept; NaN counts as lowest) and `positions` (where in the sequence a row came
from). Ties go to the lowest position. Protected rows (the first `n_sink`, the last `recent` positions) are never
chosen. `walk` makes those decisions one row at a time.
"""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

_FAR = 2**31 - 1
_BLOCK = 64  # new rows whose logits the walk computes, and holds, at once
_LOGITS = 2**23  # most of these logits in NumPy, over all heads
_SMALL = 1e-30  # a sum of float32 weights above it is exact to rounding, though the largest weight is not in it
_LOWEST = float(np.finfo(np.float32).min)


def _candidates(
    rank: mx.array, positions: mx.array, offset: mx.array | int, n_sink: int, recent: mx.array | int
) -> mx.array:
    """rank with protected rows lifted to +inf and NaN lowered to -inf."""
    rank = mx.where(mx.isnan(rank), -mx.inf, rank)
    return mx.where((positions < n_sink) | (positions >= offset - recent), mx.inf, rank)


def keep_rows(rank: mx.array, positions: mx.array, offset: int, budget: int, n_sink: int, recent: int) -> mx.array:
    """One selection of `budget` rows out of n > budget.

    Args:
        rank: [B, H, n] float32, rows in temporal order.
        positions: [B, H, n] int32.
        offset: tokens seen; the recent rows are those at positions offset - recent and later.
        budget, n_sink, recent: rows; n_sink + recent < budget.

    Returns:
        [B, H, budget] int32 indices of the kept rows, still in temporal order.
    """
    n = rank.shape[-1]
    drop = n - budget
    rank = _candidates(rank, positions, offset, n_sink, recent)
    threshold = mx.sort(rank, axis=-1)[..., drop - 1 : drop]
    below, equal = rank < threshold, rank == threshold
    ties = drop - below.sum(axis=-1, keepdims=True)
    dropped = below | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= ties))
    place = mx.where(dropped, budget, mx.cumsum((~dropped).astype(mx.int32), axis=-1) - 1)
    rows = mx.broadcast_to(mx.arange(n, dtype=mx.int32), place.shape)
    kept = mx.zeros((*place.shape[:-1], budget + 1), mx.int32)  # the last place takes all that are dropped
    return mx.put_along_axis(kept, place, rows, axis=-1)[..., :budget]


def evict_row(
    rank: mx.array, positions: mx.array, stored: mx.array, offset: mx.array, n_sink: int, recent: mx.array
) -> mx.array:
    """The one row to free in each head.

    Args:
        rank, positions: [B, H, n], rows in any order.
        stored: [B, H or 1, n] boolean; only these rows can be chosen.
        offset, recent: [B, 1, 1] int32, tokens seen and protected last rows of each sequence.

    Returns:
        [B, H, 1] int32 index of the row.
    """
    rank = _candidates(rank, positions, offset, n_sink, recent)
    rank = mx.where(stored, rank, mx.inf)
    lowest = rank == rank.min(axis=-1, keepdims=True)
    return mx.argmin(mx.where(lowest & stored, positions, _FAR), axis=-1, keepdims=True).astype(mx.int32)


def walk(
    stored: mx.array,
    new: mx.array,
    scores: mx.array,
    budget: int,
    n_sink: int,
    recent: int,
    gumbel: mx.array | None = None,
    temperatures: Sequence[float] = (),
    tile_bytes: int = 1 << 28,
) -> tuple[mx.array, mx.array]:
    """Insert rows one after another, each incoming key scoring the rows alive before it (the key is its own query).

    Per new row: score += softmax(K . k / sqrt(D)) over the alive rows; the row joins with score 0 (1 when it is the
    first of all); over budget, the unprotected row with the lowest score + tau * g is freed. The first `n_sink` and the
    last `recent` of the rows alive are protected. On a CPU the steps run in NumPy, on a GPU in one kernel for many of
    them (`kernels.walk`), elsewhere in MLX operations.

    Args:
        stored: [B, H, m, D], m <= budget rows in temporal order.
        new: [B, H, S, D], rows that follow them.
        scores: [B, H, m + S] float32; the new rows' entries are their starting scores: 0, or -inf for a row to be
            ranked last, which gives and takes no mass.
        gumbel: [B, H, m + S] float32, the frozen noise g of each row.
        temperatures: tau at each of the S decisions; unused without `gumbel`.
        tile_bytes: bound on the float32 logits that the kernel has at once; the other two hold those of 64 rows.

    Returns:
        indices [B, H, min(m + S, budget)] int32 of the survivors in temporal order (into stored, then new rows), and
        their scores, float32 of the same shape.
    """
    B, H = scores.shape[:2]
    stored, new, scores = (a.reshape(B * H, *a.shape[2:]) for a in (stored, new, scores))
    gumbel = None if gumbel is None else gumbel.reshape(scores.shape)
    if on_cpu():
        noise = None if gumbel is None else np.asarray(gumbel)
        rows = walk_numpy(stored, new, np.asarray(scores), budget, n_sink, recent, noise, temperatures)
        index, kept = (mx.array(a) for a in rows)
    else:
        from .kernels.walk import walk_on_device  # which needs this module

        index, kept = walk_on_device(stored, new, scores, budget, n_sink, recent, gumbel, temperatures, tile_bytes)
    return index.reshape(B, H, -1), kept.reshape(B, H, -1)


def on_cpu() -> bool:
    """Whether MLX computes where NumPy does, so that arrays pass between them without a copy or a wait."""
    return mx.default_device() == mx.Device(mx.cpu)


@np.errstate(over="ignore", invalid="ignore")
def walk_numpy(
    stored: mx.array,
    new: mx.array,
    scores: np.ndarray,
    budget: int,
    n_sink: int,
    recent: int,
    gumbel: np.ndarray | None = None,
    temperatures: Sequence[float] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """`walk` with one leading axis R = B * H: a matrix product and an exponential per block, few passes per new row.

    Columns of rows freed within a block stay, at weight 0 and score +inf, until it ends. Columns are in temporal order,
    so a slice leaves the protected rows out and the first minimum is the oldest.
    """
    (R, prior, _), S = stored.shape, new.shape[1]
    index = np.broadcast_to(np.arange(prior, dtype=np.int32), (R, prior))
    score = scores[:, :prior]
    block = max(1, min(_BLOCK, _LOGITS // (R * (min(prior + S, budget) + _BLOCK))))
    for first in range(0, S, block):
        T = min(block, S - first)
        count, n = index.shape[1], index.shape[1] + T
        columns = np.arange(prior + first, prior + first + T, dtype=np.int32)
        index = np.concatenate([index, np.broadcast_to(columns, (R, T))], axis=1)
        score = np.concatenate([score, scores[:, columns]], axis=1)
        stored = mx.concatenate([stored, new[:, first : first + T]], axis=1)
        logits = _block_logits(stored, T, score == -np.inf)
        if prior + first == 0:
            score[:, :1] = np.where(score[:, :1] == -np.inf, -np.inf, 1.0)
        g = gumbel if gumbel is None or T == S else np.take_along_axis(gumbel, index, axis=1)
        taus = np.asarray(temperatures[first : first + T], np.float32)
        noise = taus[0] * g if g is not None and (taus == taus[0]).all() else None
        weights = np.subtract(logits, _top(logits), order="C")
        np.exp(weights, out=weights)
        alive = np.ones((R, n), np.float32)
        mass, rank, total = np.empty_like(score), np.empty_like(score), np.empty((R, 1, 1), np.float32)
        start_of_head = np.arange(R) * n
        for i in range(T):
            np.matmul(weights[i, :, None], alive[..., None], out=total)
            if np.minimum.reduce(total, axis=None) > _SMALL:
                np.multiply(weights[i], 1.0 / total[:, 0], out=mass)
            else:  # no row yet, a bad key, or a freed row whose logit dwarfs those of the rows alive
                left = np.where(alive > 0, logits[i], -np.inf)
                mass = softmax(left, _top(left))
            score += mass
            count += 1
            if count > budget:
                ranked = score
                if g is not None:
                    ranked = np.add(score, noise if noise is not None else taus[i] * g, out=rank)
                gone = ranked[:, n_sink : n - T + i + 1 - recent].argmin(axis=1) + (start_of_head + n_sink)
                score.put(gone, np.inf)
                alive.put(gone, 0.0)
                count -= 1
        if count < n:
            kept = alive > 0
            index, score = index[kept].reshape(R, count), score[kept].reshape(R, count)
            if first + T < S:
                stored = take_rows(stored, mx.array(np.nonzero(kept)[1].reshape(R, count)))
    return index, score


@np.errstate(over="ignore", invalid="ignore")
def _block_logits(rows: mx.array, T: int, bad: np.ndarray) -> np.ndarray:
    """[T, R, n]: the last T rows . rows [R, n, D] / sqrt(D); -inf for itself, later rows, and where a key is bad.

    The product is MLX's: NumPy's OpenBLAS would wait for a second thread, for long where other work keeps it away.
    """
    n, D = rows.shape[1:]
    keys = rows.astype(mx.float32)
    logits = np.asarray((keys[:, n - T :] * D**-0.5) @ keys.swapaxes(1, 2)).swapaxes(0, 1)
    np.copyto(logits[:, :, n - T :], -np.inf, where=~np.tri(T, k=-1, dtype=np.bool_)[:, None])
    if bad.any():
        logits[:, bad] = -np.inf
        logits[bad[:, n - T :].T] = -np.inf
    return logits


def row_logits(rows: np.ndarray, key: np.ndarray, out: np.ndarray) -> np.ndarray:
    """out [R, n] float32 = one new key [R, D] float32 . rows [R, n, D] of `as_numpy` / sqrt(D)."""
    R, n, D = rows.shape
    query = key * D**-0.5
    if rows.dtype == np.float32:
        np.matmul(rows, query[..., None], out=out[..., None])
    else:
        wide = np.empty((n, D), np.float32)
        for r in range(R):  # a head at a time, so that its float32 rows stay in the processor's cache
            np.dot(as_float32(rows[r], wide), query[r], out=out[r])
    return out


def join_row(logits: np.ndarray, scores: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`walk`'s scores after one new row: [R, n] of the stored rows, and [R] of the new one, its starting scores.

    Args:
        logits: `row_logits` of the new row, overwritten.
        scores: [R, n] of the stored rows.
        key: [R, D] float32, the new row.
    """
    top = np.maximum.reduce(logits, axis=1, keepdims=True)
    if np.minimum.reduce(scores, axis=None) > -np.inf and math.isfinite(sum(top[:, 0].tolist())):
        # no key is bad: with a new one that is, every logit of its head would be infinite or NaN
        start = np.zeros(len(key), np.float32)
    else:
        start = starting_scores(key)
        logits[(scores == -np.inf) | (start == -np.inf)[:, None]] = -np.inf
        top = _top(logits)
    mass = softmax(logits, top)
    mass += scores
    return mass, start


def starting_scores(keys: np.ndarray) -> np.ndarray:
    """`walk`'s starting score of each row of [..., D] float32: 0, or -inf for a bad one."""
    finite = np.isfinite(keys)
    scores = np.zeros(keys.shape[:-1], np.float32)
    if not finite.all():
        scores[~finite.all(axis=-1)] = -np.inf
    return scores


def row_to_free(
    scores: np.ndarray,
    start: np.ndarray,
    n_sink: int,
    recent: int,
    noise: np.ndarray | None = None,
    new_noise: np.ndarray | None = None,
) -> np.ndarray:
    """`walk`'s decision over n = budget stored rows and one new row, the last: index [R] of the one that goes.

    Args:
        scores, start: [R, n] and [R], of the stored rows and the new one.
        noise, new_noise: tau * g of both, or None.
    """
    n = scores.shape[1]
    chosen = slice(n_sink, min(n, n + 1 - recent))
    rank = scores[:, chosen] if noise is None else scores[:, chosen] + noise[:, chosen]
    gone: np.ndarray = rank.argmin(axis=1) + n_sink
    if recent > 0:
        return gone
    new_rank = start if new_noise is None else start + new_noise
    return np.asarray(np.where(new_rank < rank[np.arange(len(gone)), gone - n_sink], n, gone))


def softmax(logits: np.ndarray, top: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, in place, `top` being `_top(logits)`; all 0 where every logit is -inf."""
    logits -= top
    np.exp(logits, out=logits)
    logits *= 1.0 / np.maximum(np.add.reduce(logits, axis=-1, keepdims=True), 1.0)
    return logits


def _top(logits: np.ndarray) -> np.ndarray:
    """The largest over the last axis, a number always; NaN and +inf in `logits`, of finite keys too large, go first."""
    top = np.maximum.reduce(logits, axis=-1, keepdims=True)
    if not np.maximum.reduce(top, axis=None) < np.inf:
        np.nan_to_num(logits, copy=False, nan=-np.inf, posinf=-_LOWEST, neginf=-np.inf)
        top = np.maximum.reduce(logits, axis=-1, keepdims=True)
    return np.maximum(top, _LOWEST)


def as_numpy(a: mx.array) -> np.ndarray:
    """The memory of an array on a CPU, not a copy; bfloat16, which NumPy lacks, as its bits in uint16."""
    return np.asarray(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a)


def as_float32(a: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Numbers of `as_numpy` as float32, into `out` where it is given and `a` is not float32 already."""
    if a.dtype == np.float32:
        return a
    if out is None:
        out = np.empty(a.shape, np.float32)
    if a.dtype == np.uint16:
        np.left_shift(a, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[...] = a
    return out


def take_rows(a: mx.array, index: mx.array) -> mx.array:
    """Rows `index` [R, m] of a [R, n, ...]; it copies whole rows, many times faster than `take_along_axis`."""
    R, n = a.shape[:2]
    wide = a.shape[-1] * a.itemsize % 8 == 0 and a.ndim > 2  # fewer and wider elements: 4 times as fast on a GPU
    dtype, a = a.dtype, a.view(mx.uint64) if wide else a
    first = mx.arange(0, R * max(n, 1), max(n, 1), dtype=mx.int32)  # by value: no number in the host's memory
    flat = index.astype(mx.int32) + first[:, None]
    rows = mx.take(a.reshape(R * n, *a.shape[2:]), flat, axis=0)
    return rows.view(dtype) if wide else rows


def walk_mlx(
    stored: mx.array,
    new: mx.array,
    scores: mx.array,
    budget: int,
    n_sink: int,
    recent: int,
    gumbel: mx.array | None = None,
    temperatures: Sequence[float] = (),
) -> tuple[mx.array, mx.array]:
    """`walk_numpy` without leaving the device: all columns stay until the end."""
    (R, n), (prior, D) = scores.shape, stored.shape[1:]
    usable = scores != -mx.inf
    keys = mx.concatenate([stored, new], axis=1).astype(mx.float32)
    keys = mx.where(usable[..., None], keys, 0.0)
    column = mx.arange(n, dtype=mx.int32)
    alive = mx.broadcast_to(column < prior, (R, n))
    count = prior
    if prior == 0:
        scores = mx.where(usable & (column == 0), 1.0, scores)
    for i in range(n - prior):
        at = prior + i
        if i % _BLOCK == 0:
            logits = (keys[:, at : at + _BLOCK] @ keys.swapaxes(-1, -2)) * D**-0.5
            logits = mx.clip(mx.where(mx.isnan(logits), -mx.inf, logits), _LOWEST, -_LOWEST)
        seen = alive & usable
        p = mx.softmax(mx.where(seen, logits[:, i % _BLOCK], _LOWEST), axis=-1)
        scores = mx.where(seen & usable[:, at : at + 1], scores + p, scores)
        alive = alive | (column == at)
        count += 1
        if count > budget:
            rank = scores if gumbel is None or temperatures[i] == 0 else scores + temperatures[i] * gumbel
            # the last `recent` columns so far are the last `recent` rows alive, as none of them was freed
            gone = evict_row(rank, column, alive, mx.array(at + 1), n_sink, mx.array(recent))
            alive = alive & (column != gone)
            count -= 1
        if i % 32 == 31:
            mx.eval(scores, alive)
    index = mx.sort(mx.where(alive, column, n), axis=-1)[..., :count]
    return index, mx.take_along_axis(scores, index, axis=-1)
