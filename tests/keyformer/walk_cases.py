"""What follows the blocks and rows of `keyformer.kernels.walk_cases` in float64: for operations, GPU and emulator.

The arithmetic is written from ALGORITHM.md, in loops over heads, tokens and rows; it shares no code with `keyformer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from keyformer.kernels.insert import Arrivals, Limits, Rows
from keyformer.kernels.walk_cases import CASES, ROW_CASES, Block, Case, RowCase, make, make_row, tile_bytes

__all__ = [
    "CASES",
    "ROW_CASES",
    "Block",
    "Case",
    "RowCase",
    "check",
    "check_row",
    "make",
    "make_row",
    "tile_bytes",
    "truth",
]

NEAR = 1e-6  # ranks closer than this may change places
MOST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Kept:
    """Of one head: the rows kept, their scores, and how close any decision was."""

    index: list[int]
    scores: list[float]
    margin: float


def truth(case: Case, block: Block) -> list[Kept]:
    """The walk in float64, one token and one head at a time."""
    stored, new = (np.array(a.astype(mx.float32), np.float64) for a in (block.stored, block.new))
    keys, start = np.concatenate([stored, new], axis=1), np.array(block.scores, np.float64)
    g = None if block.gumbel is None else np.array(block.gumbel, np.float64)
    return [_walk(case, keys[r], start[r].copy(), None if g is None else g[r], block.taus) for r in range(case.rows)]


def _weights(keys: np.ndarray, key: np.ndarray) -> np.ndarray:
    logits = np.clip(keys @ key, -MOST, MOST) / math.sqrt(len(key))
    logits = np.where(np.isnan(logits), -math.inf, logits)
    return np.asarray(np.exp(logits - logits.max()))


def _walk(case: Case, keys: np.ndarray, scores: np.ndarray, g: np.ndarray | None, taus: list[float]) -> Kept:
    alive, margin = list(range(case.prior)), math.inf
    good = scores != -math.inf
    if case.prior == 0 and good[0]:
        scores[0] = 1.0
    for t, tau in enumerate(taus):
        here = case.prior + t
        rows = np.array([j for j in alive if good[j]], int)
        if good[here] and len(rows):
            weights = _weights(keys[rows], keys[here])
            scores[rows] += weights / weights.sum()
        alive.append(here)
        if len(alive) > case.budget:
            free = [j for j in alive if case.n_sink <= j <= here - case.recent]
            rank = scores[free] + (0 if g is None else float(np.float32(tau)) * g[free])
            rank = np.where(np.isnan(rank), -math.inf, rank)
            gone = int(np.argmin(rank))
            others = np.delete(rank, gone) - rank[gone] if math.isfinite(rank[gone]) else np.array([])
            # what is equal on purpose is equal in float32 too
            others = others[others > 0] if g is None and (case.tie or rank[gone] == 0) else others
            margin = min(margin, *(others / max(1.0, abs(rank[gone]))), math.inf)
            alive.remove(free[gone])
    return Kept(alive, scores[alive].tolist(), margin)


def check(case: Case, true: list[Kept], index: mx.array, scores: mx.array) -> int:
    """Compare with the truth; returns in how many heads other rows stayed, by a decision between ranks closer than
    NEAR."""
    differing = 0
    n_kept = min(case.prior + case.tokens, case.budget)
    assert index.shape == scores.shape == (case.rows, n_kept)
    for r, kept in enumerate(true):
        if index[r].tolist() != kept.index:
            assert kept.margin < NEAR, f"head {r} kept {index[r].tolist()}, expected {kept.index}"
            differing += 1
        else:
            np.testing.assert_allclose(scores[r].tolist(), kept.scores, rtol=1e-5, atol=3e-6, err_msg=f"head {r}")
    return differing


def check_row(case: RowCase, rows: Rows, new: Arrivals, limits: Limits, after: Rows, index: mx.array) -> int:
    """Compare one insertion or eviction with float64; returns in how many heads another row went, as `check`."""
    walk, t = case.walk, case.token
    R, _, D = rows.keys.shape
    old = [np.array(a.astype(mx.float32), np.float64) for a in rows[:4]]
    places = np.array(rows.positions, np.int64)
    plain = None if rows.unrotated is None else np.array(rows.unrotated, np.float64)
    if not case.evicts:
        one = [np.array(a[:, t : t + 1].astype(mx.float32), np.float64) for a in new[:2]]
        g = np.array(new.gumbel[:, case.noise_at : case.noise_at + 1], np.float64)
        bad = ~np.isfinite(one[0]).all(axis=-1)
        old = [np.concatenate([a, b], axis=1) for a, b in zip(old, (*one, np.where(bad, -np.inf, 0.0), g), strict=True)]
        places = np.concatenate([places, np.full((R, 1), case.position)], axis=1)
        if plain is not None and new.unrotated is not None:
            plain = np.concatenate([plain, np.array(new.unrotated[:, t : t + 1], np.float64)], axis=1)
    n = old[2].shape[1]
    stay = min(n, limits.budget)
    assert index.shape == after.positions.shape == (R, stay)
    differing = 0
    got = [np.array(a.astype(mx.float32), np.float64) for a in after[:4]]
    for r in range(R):
        keys, scores, g = old[0][r], old[2][r], old[3][r]
        good = scores != -math.inf
        if not case.evicts and good[-1] and good[:-1].any():
            rows_ = np.flatnonzero(good[:-1])
            weights = _weights(keys[rows_], keys[-1])
            scores[rows_] += weights / weights.sum()
        kept = np.arange(n)
        if n > stay:
            rank = scores + float(np.float32(case.tau)) * g
            rank = np.where(np.isnan(rank), -math.inf, rank)
            rank[: walk.n_sink] = rank[n - walk.recent :] = math.inf
            gone = int(np.argmin(rank))
            kept = np.delete(kept, gone)
            chosen = np.setdiff1d(np.arange(n), np.array(index[r]))
            assert len(chosen) == 1, f"head {r}: {index[r].tolist()}"
            if chosen[0] != gone:
                assert rank[chosen[0]] - rank[gone] < NEAR and not case.walk.tie, f"head {r}: {chosen[0]} for {gone}"
                differing += 1
                continue
        assert index[r].tolist() == kept.tolist()
        np.testing.assert_allclose(got[2][r], scores[kept], rtol=1e-5, atol=2e-6, err_msg=f"scores of head {r}")
        np.testing.assert_array_equal(got[1][r], old[1][r][kept], err_msg=f"values of head {r}")
        np.testing.assert_array_equal(got[3][r], g[kept], err_msg=f"noise of head {r}")
        turned = plain is not None and n > stay
        labels = np.arange(stay) if turned else places[r][kept]
        assert after.positions[r].tolist() == labels.tolist()
        expected = keys[kept]
        if plain is not None:
            assert after.unrotated is not None
            np.testing.assert_array_equal(np.array(after.unrotated[r]), plain[r][kept])
        if turned and plain is not None:
            half = D // 2
            angles = labels[:, None] / limits.rope_base ** (np.arange(half) / max(half, 1))
            a, b = plain[r][kept][:, :half], plain[r][kept][:, half : 2 * half]
            wide = np.concatenate(
                [
                    a * np.cos(angles) - b * np.sin(angles),
                    a * np.sin(angles) + b * np.cos(angles),
                    plain[r][kept][:, 2 * half :],
                ],
                axis=1,
            )
            moved = places[r][kept] != labels
            step = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}.get(walk.dtype, 1e-6)  # one unit in the last place
            np.testing.assert_allclose(got[0][r][moved], wide[moved], rtol=step, atol=1e-6)
            expected, got_keys = expected[~moved], got[0][r][~moved]
        else:
            got_keys = got[0][r]
        np.testing.assert_array_equal(got_keys, expected, err_msg=f"keys of head {r}")
    return differing
