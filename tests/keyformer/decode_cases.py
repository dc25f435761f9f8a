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
from keyformer.kernels.decode import Outcome, Step
from keyformer.kernels.decode_cases import CASES, POLICIES, SIZES, Case, make
from keyformer.scores import Asked

__all__ = ["CASES", "POLICIES", "SIZES", "Case", "Truth", "check", "make", "truth"]

NEAR = 1e-6  # scores closer than this may change places
EXACT = 5e-6  # float32 logits, exponentials and noise


@dataclass(frozen=True)
class Truth:
    """In float64: scores, masses and ranks [B, Hkv, n], NaN where a sequence has no row; protected rows at +inf."""

    scores: np.ndarray
    masses: np.ndarray | None
    ranks: np.ndarray


def truth(policy: Policy, layer: int, step: Step, asked: Asked | None) -> Truth:
    """The same step in float64."""
    p = policy
    B, H = step.scores.shape[:2]
    n = max(step.rows)
    keys = np.array(step.keys.astype(mx.float32), np.float64)
    before = np.array(step.scores, np.float64)
    positions = np.array(step.positions)
    scores = np.full((B, H, n), math.nan)
    ranks = np.full((B, H, n), math.nan)
    masses = None if step.masses is None else np.full((B, H, n, p.window), math.nan)
    for b, h in np.ndindex(B, H):
        rows, offset, tau = step.rows[b], step.offsets[b], float(np.float32(step.taus[b]))
        good = before[b, h, :rows] != -math.inf
        at = positions[b, h, :rows]
        mass = np.zeros(rows)
        if asked is not None:
            G = asked.queries.shape[1] // H
            lost = False
            for head in range(h * G, h * G + G):
                q = np.array(asked.queries[b, head, 0].astype(mx.float32), np.float64)
                if not np.isfinite(q).all() or not good.any():
                    continue
                logits = keys[b, h, :rows][good] @ q * asked.scale
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
            new = int(step.slot[b, h, 0])
            others = good & (np.arange(rows) != new)
            if good[new] and others.any():
                logits = keys[b, h, :rows][others] @ keys[b, h, new] / math.sqrt(keys.shape[3])
                weights = np.exp(logits - logits.max())
                mass[others] = weights / weights.sum()
            if offset == 1:
                mass[new] = 1.0
        if masses is not None:
            assert step.masses is not None
            masses[b, h, :rows] = np.c_[np.array(step.masses[b, h, :rows, 1:], np.float64), mass]
            after = np.where(good, masses[b, h, :rows].sum(axis=1), -math.inf)
        else:
            after = before[b, h, :rows] * (p.decay if p.decay < 1 else 1.0) + mass
        scores[b, h, :rows] = after
        rank = np.where(good, 0.0, -math.inf) if p.attention == "none" else after.copy()
        if p.normalize == "count":
            seen = np.maximum(offset - at, 1).astype(float)
            seen = np.minimum(seen, p.window) if p.window else seen
            if p.decay < 1:
                seen = np.array([-math.expm1(s * math.log(p.decay)) / (1 - p.decay) for s in seen])
            rank = rank / seen
        if p.noise == "select":
            rank = rank + [tau * oracle.draw(p.distribution, p.seed, layer, h, int(j)) for j in at]
        rank[(at < p.n_sink) | (at >= offset - step.recents[b])] = math.inf
        ranks[b, h, :rows] = rank
    return Truth(scores, masses, ranks)


def check(case: Case, step: Step, outcome: Outcome, true: Truth) -> int:
    """Compare an outcome with the truth; returns how many rows were freed that another should have been, by a
    difference of less than NEAR."""
    differing = 0
    assert outcome.free is not None and outcome.free.shape == step.slot.shape
    free, scores = np.array(outcome.free), np.array(outcome.scores)
    positions = np.array(step.positions)
    for b, h in np.ndindex(*free.shape[:2]):
        rows = step.rows[b]
        if case.policy.attention != "none":
            np.testing.assert_allclose(scores[b, h, :rows], true.scores[b, h, :rows], rtol=EXACT, atol=EXACT)
        if true.masses is not None:
            assert outcome.masses is not None
            masses = np.array(outcome.masses[b, h, :rows])
            np.testing.assert_allclose(masses, true.masses[b, h, :rows], rtol=EXACT, atol=EXACT)
        rank = true.ranks[b, h, :rows]
        chosen = int(free[b, h, 0])
        assert 0 <= chosen < rows, f"slot {chosen} of {rows} rows"
        lowest = rank.min()
        first = min(np.flatnonzero(rank == lowest), key=lambda j: positions[b, h, j])
        if chosen != first:
            no_numbers = case.policy.attention == case.policy.noise == "none"
            exact = case.tie or no_numbers or not math.isfinite(lowest)
            assert not exact, f"sequence {b}, head {h}: freed {chosen}, expected {first}, of equal ranks"
            assert rank[chosen] - lowest < NEAR * max(1.0, abs(lowest)), f"freed {chosen}, expected {first}"
            differing += 1
    return differing
