"""The functional API in float64 NumPy, written from ALGORITHM.md and the seed's text: one head, one token at a time.

It shares no code with `keyformer`; the noise comes from the oracle of the cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import oracle


def rope(x: np.ndarray, position: int, base: float = 10000.0) -> np.ndarray:
    """One un-rotated row turned to its position: component i pairs with i + D // 2; an odd last one does not turn."""
    half = len(x) // 2
    out = np.array(x, np.float64)
    for i in range(half):
        angle = position * base ** (-i / half)
        a, b = float(x[i]), float(x[i + half])
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = a * math.sin(angle) + b * math.cos(angle)
    return out


@dataclass
class Row:
    arrival: int  # tokens of the head before it: where it came from
    label: int  # the position it is rotated at
    plain: np.ndarray  # before rotation
    key: np.ndarray  # as stored
    value: np.ndarray
    noise: float
    score: float = 0.0

    @property
    def bad(self) -> bool:
        return not np.isfinite(self.key).all()


@dataclass
class Head:
    budget: int
    n_sink: int = 0
    recent: int = 0
    tau_init: float = 1.0
    tau_end: float = 1.0
    anneal_steps: int = 0
    rope_base: float = 10000.0
    seed: int = 0
    positions: str = "contiguous"
    storage: type = np.float64  # what a turned row is rounded to
    rows: list[Row] = field(default_factory=list)
    pos: int = 0
    margin: float = math.inf  # the smallest gap between a row that went and one that could have gone instead

    def insert(self, plain: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
        """One token: its key before rotation and as it comes in."""
        D = len(key)
        good = [r for r in self.rows if not r.bad]
        new = Row(self.pos, self.pos, plain, key.astype(np.float64), value, self.gumbel(self.pos))
        if good and not new.bad:
            logits = [float(r.key @ new.key) / math.sqrt(D) for r in good]
            top = max(logits)
            weights = [math.exp(x - top) for x in logits]
            for r, w in zip(good, weights, strict=True):
                r.score += w / sum(weights)
        if not self.rows:
            new.score = 1.0
        self.rows.append(new)
        if len(self.rows) > self.budget:
            self.evict(oracle.temperature(self.pos, self.tau_init, self.tau_end, self.anneal_steps))
        self.pos += 1

    def gumbel(self, position: int) -> float:
        return oracle.gumbel(self.seed, 0, 0, position)

    def evict(self, tau: float) -> None:
        free = self.rows[self.n_sink : len(self.rows) - self.recent]
        rank = [-math.inf if r.bad else r.score + tau * r.noise for r in free]
        gone = rank.index(min(rank))
        others = [x - rank[gone] for i, x in enumerate(rank) if i != gone and x > -math.inf]
        # rows that no token has scored yet tie exactly on both sides when there is no noise
        others = [x for x in others if not (x == 0 and tau == 0 and rank[gone] == 0)]
        if rank[gone] > -math.inf:
            self.margin = min([self.margin, *others])
        self.rows.remove(free[gone])
        if self.positions == "contiguous":
            for label, r in enumerate(self.rows):
                if r.label != label:
                    r.label = label
                    r.key = rope(r.plain, label, self.rope_base).astype(self.storage).astype(np.float64)

    def scores(self) -> list[float]:
        return [-math.inf if r.bad else r.score for r in self.rows]
