"""Which row goes: the definition, in float32 array operations.

Every function takes `rank` (higher is kept; NaN counts as lowest) and `positions` (where in the sequence a row came
from). Ties go to the lowest position. Protected rows (the first `n_sink`, the last `recent` positions) are never
chosen. `walk` makes those decisions one row at a time.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

_FAR = 2**31 - 1
_BLOCK = 192  # new rows whose logits the walk computes, and holds, at once
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
    return mx.sort(mx.where(dropped, n, mx.arange(n, dtype=mx.int32)), axis=-1)[..., :budget]


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
) -> tuple[mx.array, mx.array]:
    """Insert rows one after another, each incoming key scoring the rows alive before it (the key is its own query).

    Per new row: score += softmax(K . k / sqrt(D)) over the alive rows; the row joins with score 0 (1 when it is the
    first of all); over budget, the unprotected row with the lowest score + tau * g is freed. The first `n_sink` and the
    last `recent` of the rows alive are protected. On a CPU the steps run in NumPy, elsewhere in MLX operations.

    Args:
        stored: [B, H, m, D], m <= budget rows in temporal order.
        new: [B, H, S, D], rows that follow them.
        scores: [B, H, m + S] float32; the new rows' entries are their starting scores: 0, or -inf for a row to be
            ranked last, which gives and takes no mass.
        gumbel: [B, H, m + S] float32, the frozen noise g of each row.
        temperatures: tau at each of the S decisions; unused without `gumbel`.

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
        index, kept = walk_mlx(stored, new, scores, budget, n_sink, recent, gumbel, temperatures)
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
    """`walk` with one leading axis R = B * H: the matrix product of a block in MLX, on one thread, the steps in NumPy.

    Columns of rows freed within a block stay, at weight 0, until it ends. Columns are in temporal order, so a slice
    leaves the protected rows out and the first minimum is the oldest.
    """
    (R, prior, _), S = stored.shape, new.shape[1]
    index = np.broadcast_to(np.arange(prior, dtype=np.int32), (R, prior))
    score = scores[:, :prior]
    for first in range(0, S, _BLOCK):
        block = new[:, first : first + _BLOCK]
        count, T = index.shape[1], block.shape[1]
        arriving = np.arange(prior + first, prior + first + T, dtype=np.int32)
        index = np.concatenate([index, np.broadcast_to(arriving, (R, T))], axis=1)
        score = np.concatenate([score, scores[:, arriving]], axis=1)
        g = gumbel if gumbel is None or T == S else np.take_along_axis(gumbel, index, axis=1)
        bad = score == -np.inf
        if prior + first == 0:
            score[:, :1] = np.where(bad[:, :1], -np.inf, 1.0)
        # the only new row's own logit is not used: no copy of the stored rows to join it to them
        rows = stored if S == 1 else mx.concatenate([stored, block], axis=1)
        logits = _block_logits(rows, block, bad)
        hidden = np.zeros_like(score)
        hidden[bad] = -np.inf
        alive = np.ones_like(bad)
        taus = np.asarray(temperatures[first : first + T], np.float32)
        noise = taus[0] * g if g is not None and (taus == taus[0]).all() else None
        row_starts = np.arange(R) * index.shape[1]
        for i in range(T):
            seen = index.shape[1] - T + i
            if seen:
                p = logits[:, i, :seen] + hidden[:, :seen]
                p -= np.maximum(np.maximum.reduce(p, axis=1, keepdims=True), _LOWEST)
                np.exp(p, out=p)
                p /= np.maximum(np.add.reduce(p, axis=1, keepdims=True), 1.0)  # 0 where the query or every row is bad
                score[:, :seen] += p
            count += 1
            if count > budget:
                chosen = slice(n_sink, seen + 1 - recent)
                rank = score[:, chosen]
                if g is not None:
                    rank = rank + (noise[:, chosen] if noise is not None else taus[i] * g[:, chosen])
                gone = rank.argmin(axis=1) + (row_starts + n_sink)
                score.put(gone, np.inf)
                hidden.put(gone, -np.inf)
                alive.put(gone, False)
                count -= 1
        if first + T < S:
            stored = rows if alive.all() else take_rows(rows, mx.array(np.nonzero(alive)[1].reshape(R, count)))
        if count < index.shape[1]:
            index, score = index[alive].reshape(R, count), score[alive].reshape(R, count)
    return index, score


@np.errstate(over="ignore", invalid="ignore")
def step_numpy(
    stored: mx.array,
    new: mx.array,
    scores: np.ndarray,
    start: np.ndarray,
    n_sink: int,
    recent: int,
    noise: np.ndarray | None = None,
    new_noise: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`walk_numpy` for one row that joins n = budget others, which is decoding: few passes over them, no copies.

    Args:
        stored, new: [R, n, D] and [R, 1, D].
        scores, start: [R, n] float32, and [R] starting scores of the new row.
        noise, new_noise: tau * g of the rows, [R, n], and of the new one, [R].

    Returns:
        index [R] of the row that goes, n for the new one, and the new scores of the n stored rows.
    """
    n = scores.shape[1]
    logits = _block_logits(stored, new, np.concatenate([scores, start[:, None]], axis=1) == -np.inf)[:, 0]
    p = logits - np.maximum(logits.max(axis=1, keepdims=True), _LOWEST)
    np.exp(p, out=p)
    p /= np.maximum(p.sum(axis=1, keepdims=True), 1.0)
    p += scores
    chosen = slice(n_sink, min(n, n + 1 - recent))
    rank = p[:, chosen] if noise is None else p[:, chosen] + noise[:, chosen]
    gone = rank.argmin(axis=1)
    if recent == 0:
        new_rank = start if new_noise is None else start + new_noise
        return np.where(new_rank < rank[np.arange(len(gone)), gone], n, gone + n_sink), p
    return gone + n_sink, p


def _block_logits(rows: mx.array, block: mx.array, bad: np.ndarray) -> np.ndarray:
    """[R, T, n]: block [R, T, D] . rows [R, n, D] / sqrt(D); -inf where either key is bad, never NaN or +inf.

    `bad` marks the columns, rows first; its last T are the block's.
    """
    T, n = block.shape[1], rows.shape[1]
    q, k = block.astype(mx.float32) * block.shape[2] ** -0.5, rows.astype(mx.float32)
    product = (k @ q.swapaxes(1, 2)).swapaxes(1, 2) if T == 1 else q @ k.swapaxes(1, 2)
    logits = np.asarray(product)
    if bad.any():
        logits = np.where(bad[:, None, :n] | bad[:, -T:, None], np.float32(-np.inf), logits)
    if not logits.max(initial=-np.inf) < np.inf:  # finite keys whose product is not
        np.nan_to_num(logits, copy=False, nan=-np.inf, posinf=-_LOWEST, neginf=-np.inf)
    return logits


def take_rows(a: mx.array, index: mx.array) -> mx.array:
    """Rows `index` [R, m] of a [R, n, ...]; it copies whole rows, many times faster than `take_along_axis`."""
    R, n = a.shape[:2]
    flat = index.astype(mx.int32) + n * mx.arange(R, dtype=mx.int32)[:, None]
    return mx.take(a.reshape(R * n, *a.shape[2:]), flat, axis=0)


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
