"""Which row goes: the definition, in float32 array operations.

Every function takes `rank` (higher is kept; NaN counts as lowest) and `positions` (where in the sequence a row came
from). Ties go to the lowest position. Protected rows (the first `n_sink`, the last `recent` positions) are never
chosen.
"""

from collections.abc import Callable

import mlx.core as mx

_FAR = 2**31 - 1
_BLOCK = 256  # new rows whose logits the walk computes, and holds, at once


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
    keys: mx.array,
    scores: mx.array,
    positions: mx.array,
    prior: int,
    budget: int,
    n_sink: int,
    recent: int,
    bonus: Callable[[int], mx.array] | None = None,
) -> tuple[mx.array, mx.array]:
    """Insert rows one after another, each incoming key scoring the rows alive before it (the key is its own query).

    Per new row: score += softmax(K . k / sqrt(D)) over the alive rows; the row joins with score 0 (1 when it is the
    first of all); over budget, the unprotected row with the lowest score + bonus is freed.

    Args:
        keys: [B, H, n, D]: `prior` stored rows in temporal order, then the n - prior new ones.
        scores: [B, H, n] float32; the new rows' entries are their starting scores (0, or -inf for a row to be ranked
            last).
        positions: [B, H, n] int32, ascending.
        bonus: bonus(i) is added to the scores at the decision for new row i: [B, H, n] float32 (tau * g).

    Returns:
        indices [B, H, min(n, budget)] int32 of the survivors in temporal order, and all scores [B, H, n] float32.
    """
    B, H, n, D = keys.shape
    usable = scores != -mx.inf
    keys = mx.where(usable[..., None], keys.astype(mx.float32), 0.0)
    column = mx.arange(n, dtype=mx.int32)
    alive = mx.broadcast_to(column < prior, (B, H, n))
    count = prior
    if prior == 0:
        scores = mx.where(usable & (column == 0), 1.0, scores)
    for i in range(n - prior):
        new = prior + i
        if i % _BLOCK == 0:
            logits = (keys[:, :, new : new + _BLOCK] @ keys.swapaxes(-1, -2)) * D**-0.5
        seen = alive & usable
        p = mx.softmax(mx.where(seen, logits[:, :, i % _BLOCK], mx.finfo(mx.float32).min), axis=-1)
        asks = usable[..., new : new + 1]
        scores = mx.where(seen & asks, scores + p, scores)
        alive = alive | (column == new)
        count += 1
        if count > budget:
            offset = positions[:, :, new : new + 1] + 1
            rank = scores if bonus is None else scores + bonus(i)
            gone = evict_row(rank, positions, alive, offset, n_sink, mx.array(recent))
            alive = alive & (column != gone)
            count -= 1
        if i % 32 == 31:
            mx.eval(scores, alive)
    return mx.sort(mx.where(alive, column, n), axis=-1)[..., :count], scores
