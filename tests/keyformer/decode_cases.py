"""What follows each decode step of `keyformer.kernels.decode_cases` in float64: for array operations, GPU and emulator.

The arithmetic is written from ALGORITHM.md, in loops over heads and rows; it shares no code with `keyformer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import oracle

from keyformer import Policy
from keyformer.kernels.decode import Rows
from keyformer.kernels.decode_cases import CASES, POLICIES, SIZES, Case, Given, make

__all__ = ["CASES", "POLICIES", "SIZES", "Case", "Given", "Truth", "check", "make", "truth"]

NEAR = 1e-6  # scores closer than this may change places
EXACT = 5e-6  # float32 logits, exponentials and noise


@dataclass(frozen=True)
class Truth:
    """In float64: scores, masses and ranks [L*B, Hkv, n], NaN where a sequence has no row; protected ones at +inf."""

    scores: np.ndarray
    masses: np.ndarray | None
    ranks: np.ndarray
    positions: np.ndarray  # int32


def truth(policy: Policy, given: Given) -> Truth:
    """The same step in float64."""
    p, now = policy, given.now
    N, H = given.rows.scores.shape[:2]
    n, B = max(now.rows), len(now.rows)
    before = np.array(given.rows.scores, np.float64)
    stored = np.array(given.rows.positions)
    scores = np.full((N, H, n), math.nan)
    ranks = np.full((N, H, n), math.nan)
    masses = None if given.rows.masses is None else np.full((N, H, n, p.window), math.nan)
    for i, h in np.ndindex(N, H):
        read, b = given.reads[i // B], i % B
        asked, layer = read.asked, read.layer
        rows, offset, tau = now.rows[b], now.offsets[b], float(np.float32(now.taus[b]))
        new = int(given.rows.slot[i, h, 0, 0])
        keys = np.array(read.keys[b, h, :rows].astype(mx.float32), np.float64)
        before[i, h, new] = 0.0 if np.isfinite(keys[new]).all() else -math.inf
        stored[i, h, new] = offset - 1
        good = before[i, h, :rows] != -math.inf
        at = stored[i, h, :rows]
        mass = np.zeros(rows)
        if asked is not None:
            G = asked.queries.shape[1] // H
            lost = False
            for head in range(h * G, h * G + G):
                q = np.array(asked.queries[b, head, 0].astype(mx.float32), np.float64)
                if not np.isfinite(q).all() or not good.any():
                    continue
                logits = keys[good] @ q * asked.scale
                lost |= bool((np.abs(logits) > 3.4e38).any())
                if asked.soft_cap is not None:
                    logits = asked.soft_cap * np.tanh(logits / asked.soft_cap)
                if p.noise == "logit":
                    asking = offset - 1 if p.redraw else None
                    logits = logits + [
                        oracle.draw(p.distribution, p.seed, layer, head, int(j), asking) for j in at[good]
                    ]
                if p.noise != "select":
                    logits = logits / tau
                sink = -math.inf
                if asked.sinks is not None:
                    sink = float(asked.sinks[head].astype(mx.float32)) / (tau if p.noise != "select" else 1.0)
                most = max(logits.max(), sink)
                weights = np.exp(logits - most)
                mass[good] += weights / (weights.sum() + math.exp(sink - most))
            if lost:
                mass[:] = 0.0
        elif p.attention == "key":
            others = good & (np.arange(rows) != new)
            if good[new] and others.any():
                logits = keys[others] @ keys[new] / math.sqrt(keys.shape[1])
                weights = np.exp(logits - logits.max())
                mass[others] = weights / weights.sum()
            if offset == 1:
                mass[new] = 1.0
        if masses is not None:
            assert given.rows.masses is not None
            counted = np.array(given.rows.masses[i, h, :rows, 1:], np.float64)
            counted[new] = 0.0
            masses[i, h, :rows] = np.c_[counted, mass]
            after = np.where(good, masses[i, h, :rows].sum(axis=1), -math.inf)
        else:
            after = before[i, h, :rows] * (p.decay if p.decay < 1 else 1.0) + mass
        scores[i, h, :rows] = after
        rank = np.where(good, 0.0, -math.inf) if p.attention == "none" else after.copy()
        if p.normalize == "count":
            seen = np.maximum(offset - at, 1).astype(float)
            seen = np.minimum(seen, p.window) if p.window else seen
            if p.decay < 1:
                seen = np.array([-math.expm1(s * math.log(p.decay)) / (1 - p.decay) for s in seen])
            rank = rank / seen
        if p.noise == "select":
            rank = rank + [tau * oracle.draw(p.distribution, p.seed, layer, h, int(j)) for j in at]
        rank[(at < p.n_sink) | (at >= offset - now.recents[b])] = math.inf
        ranks[i, h, :rows] = rank
    return Truth(scores, masses, ranks, stored[..., :n])


def check(case: Case, given: Given, after: Rows, true: Truth) -> int:
    """Compare the rows after a step with the truth; returns how many slots were freed that another should have been, by
    a difference of less than NEAR."""
    differing = 0
    assert after.slot.shape == given.rows.slot.shape
    slot, scores, positions = np.array(after.slot), np.array(after.scores), np.array(after.positions)
    for i, h in np.ndindex(*slot.shape[:2]):
        rows, budget = given.now.rows[i % len(case.rows)], given.now.budgets[i % len(case.rows)]
        np.testing.assert_array_equal(positions[i, h, :rows], true.positions[i, h, :rows])
        np.testing.assert_allclose(scores[i, h, :rows], true.scores[i, h, :rows], rtol=EXACT, atol=EXACT)
        if true.masses is not None:
            assert after.masses is not None
            masses = np.array(after.masses[i, h, :rows])
            np.testing.assert_allclose(masses, true.masses[i, h, :rows], rtol=EXACT, atol=EXACT)
        chosen = int(slot[i, h, 0, 0])
        if rows <= budget:
            assert chosen == rows, f"sequence {i}, head {h}: {chosen}, expected the slot behind {rows} rows"
            continue
        rank = true.ranks[i, h, :rows]
        assert 0 <= chosen < rows, f"slot {chosen} of {rows} rows"
        lowest = rank.min()
        first = min(np.flatnonzero(rank == lowest), key=lambda j: true.positions[i, h, j])
        if chosen != first:
            no_numbers = case.policy.attention == case.policy.noise == "none"
            exact = case.tie or no_numbers or not math.isfinite(lowest)
            assert not exact, f"sequence {i}, head {h}: freed {chosen}, expected {first}, of equal ranks"
            assert rank[chosen] - lowest < NEAR * max(1.0, abs(lowest)), f"freed {chosen}, expected {first}"
            differing += 1
    return differing
