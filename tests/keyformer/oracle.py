"""One layer's cache in float64 NumPy, written from ALGORITHM.md: plain loops over heads, queries and rows.

It shares no code with `keyformer`. It follows the eviction too, so it says at each call what that call attends to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WORD = 0xFFFFFFFF


# -- noise: the documented hash in Python's own integers ---------------------------------------------------------------


def mix(h: int) -> int:
    """MurmurHash3's 32-bit finaliser."""
    h ^= h >> 16
    h = h * 0x85EBCA6B & WORD
    h ^= h >> 13
    h = h * 0xC2B2AE35 & WORD
    return h ^ h >> 16


def hashed(seed: int, layer: int, head: int, position: int, query: int | None = None) -> int:
    """The 32 bits behind one number. Seed (two words), layer and head make a stream; position and query index it."""
    stream = 0
    for word in (seed & WORD, seed >> 32, (layer + 1) * 0x9E3779B1):
        stream = mix(stream + word + 1 & WORD)
    stream = mix(stream + head * 0x85EBCA77 & WORD)
    h = mix(stream + position * 0xC2B2AE3D & WORD)
    asking = 0x27D4EB2F if query is None else query * 0x27D4EB2F + 1 & WORD
    return mix(h + mix(stream ^ asking) & WORD)


def uniform(h: int) -> float:
    """The upper 23 bits, each number in the middle of its cell."""
    return ((h >> 9) + 0.5) / 2**23


def gumbel(seed: int, layer: int, head: int, position: int, query: int | None = None) -> float:
    return -math.log(-math.log(uniform(hashed(seed, layer, head, position, query))))


def temperature(step: int, tau_init: float, tau_end: float, anneal_steps: int) -> float:
    if anneal_steps == 0:
        return tau_init
    return tau_init + min(step, anneal_steps) * (tau_end - tau_init) / anneal_steps


# -- arithmetic --------------------------------------------------------------------------------------------------------


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def mass(
    queries: np.ndarray,
    keys: np.ndarray,
    scale: float,
    allowed: np.ndarray,
    added: np.ndarray,
    noise: np.ndarray | None = None,
    tau: float = 1.0,
) -> np.ndarray:
    """[B, Hkv, S, n]: what each query gives to each row, summed over the query heads of the KV head.

    Args:
        queries, keys: [B, Hq, S, D] and [B, Hkv, n, D].
        allowed, added: [B, Hq, S, n], which rows a query sees, and what is added to the logits.
        noise: [B, Hq, S, n] or None.
    """
    queries, keys = queries.astype(np.float64), keys.astype(np.float64)
    B, Hq, S, _ = queries.shape
    Hkv, n = keys.shape[1:3]
    out = np.zeros((B, Hkv, S, n))
    for b, h, i in np.ndindex(B, Hq, S):
        seen = allowed[b, h, i]
        if not seen.any() or not np.isfinite(queries[b, h, i]).all():
            continue
        kv = h // (Hq // Hkv)
        logits = keys[b, kv, seen] @ queries[b, h, i] * scale + added[b, h, i, seen]
        if noise is not None:
            logits = (logits + noise[b, h, i, seen]) / tau
        out[b, kv, i, seen] += softmax(logits)
    return out


def dropped(rank: np.ndarray, positions: np.ndarray, protected: np.ndarray, count: int) -> list[int]:
    """Indices of the `count` unprotected rows of lowest rank, NaN lowest of all, ties to the lowest position."""
    free = [i for i in range(len(rank)) if not protected[i]]
    lowest = [-math.inf if math.isnan(r) else float(r) for r in rank]
    return sorted(free, key=lambda i: (lowest[i], positions[i]))[:count]


# -- one layer ---------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    position: int
    key: np.ndarray
    value: np.ndarray
    score: float = 0.0
    masses: dict[int, float] = field(default_factory=dict)  # by the asking query's position

    @property
    def bad(self) -> bool:
        return not np.isfinite(self.key).all()


@dataclass
class Layer:
    """One sequence, one layer. `recent` and `n_sink` are rows; the other choices are named as in ALGORITHM.md."""

    kv_heads: int
    budget: int | None  # None: everything stays
    attention: str = "query"
    noise: str = "none"
    redraw: bool = True
    tau_init: float = 1.0
    tau_end: float = 1.0
    anneal_steps: int = 0
    window: int = 0
    n_sink: int = 0
    recent: int = 0
    seed: int = 0
    layer: int = 0
    prefill: str = "full"

    def __post_init__(self) -> None:
        self.heads: list[list[Row]] = [[] for _ in range(self.kv_heads)]
        self.waiting: list[list[Row]] = [[] for _ in range(self.kv_heads)]  # prompt rows the key walk has not seen yet
        self.offset = 0
        self.steps = 0  # decoded tokens
        self.step = 0  # what the temperature sees: 0 in the prompt
        self.margin = math.inf  # the smallest gap between a row that went and one that stayed

    # what a test reads

    def positions(self, head: int) -> list[int]:
        return [r.position for r in self.heads[head] + self.waiting[head]]

    def scores(self, head: int) -> list[float]:
        return [-math.inf if r.bad else r.score for r in self.heads[head]]

    # one call

    def prompt(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
        """A chunk of the prompt. q [Hq, S, D], k [Hkv, S, D], v [Hkv, S, Dv]; returns the attention output."""
        self.step = 0
        out = self._attend(q, k, v, scale)
        if self.prefill == "chunked":
            self._select()
        return out

    def end_prefill(self) -> None:
        self.step = 0
        self._select()

    def decode(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
        """One token after the prompt."""
        self.steps += 1
        self.step = self.steps
        out = self._attend(q, k, v, scale)
        self._select()
        return out

    def _attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
        q, k, v = (a.astype(np.float64) for a in (q, k, v))
        group, S = q.shape[0] // self.kv_heads, q.shape[1]
        out = np.zeros((q.shape[0], S, v.shape[2]))
        first = self.offset
        tau = temperature(self.step, self.tau_init, self.tau_end, self.anneal_steps)
        for head in range(self.kv_heads):
            old = self.heads[head] + self.waiting[head]
            new = [Row(first + i, k[head, i], v[head, i]) for i in range(S)]
            for i in range(S):
                seen = old + new[: i + 1]
                for h in range(head * group, (head + 1) * group):
                    with np.errstate(all="ignore"):
                        logits = np.array([r.key @ q[h, i] * scale for r in seen])
                        out[h, i] = softmax(logits) @ np.array([r.value for r in seen])
                    if self.attention == "query":
                        self._give(seen, logits, h, first + i, tau, np.isfinite(q[h, i]).all())
            (self.waiting if self.attention == "key" else self.heads)[head].extend(new)
        self.offset += S
        if self.window:
            for row in (r for head in self.heads for r in head):
                row.score = sum(m for p, m in row.masses.items() if p >= self.offset - self.window)
        return out

    def _give(self, seen: list[Row], logits: np.ndarray, head: int, query: int, tau: float, asks: bool) -> None:
        """One query's mass."""
        if self.noise == "logit":
            asking = query if self.redraw else None
            g = [gumbel(self.seed, self.layer, head, r.position, asking) for r in seen]
            logits = (logits + np.array(g)) / tau
        good = [i for i, r in enumerate(seen) if not r.bad]
        if not good or not asks:
            return
        for i, m in zip(good, softmax(logits[good]), strict=True):
            row = seen[i]
            row.masses[query] = row.masses.get(query, 0.0) + m
            if not self.window:
                row.score += m

    # eviction

    def _select(self) -> None:
        for head in range(self.kv_heads):
            if self.attention == "key":
                self._walk(head)
            elif self.budget is not None:
                self._drop(head, self.offset)

    def _walk(self, head: int) -> None:
        """Rows join one after another, each scoring those before it, each followed by an eviction when over budget."""
        for row in self.waiting[head]:
            good = [r for r in self.heads[head] if not r.bad]
            if good and not row.bad:
                logits = np.array([r.key @ row.key for r in good]) / math.sqrt(len(row.key))
                for r, m in zip(good, softmax(logits), strict=True):
                    r.score += m
            if row.position == 0:
                row.score = 1.0
            self.heads[head].append(row)
            self._drop(head, row.position + 1)
        self.waiting[head] = []

    def _drop(self, head: int, offset: int) -> None:
        rows = self.heads[head]
        assert self.budget is not None
        if len(rows) <= self.budget:
            return
        if self.attention == "none":
            rank = [-math.inf if r.bad else float(r.position) for r in rows]
        else:
            rank = [-math.inf if r.bad else r.score for r in rows]
            if self.noise == "select":
                step = offset - 1 if self.attention == "key" else self.step
                tau = temperature(step, self.tau_init, self.tau_end, self.anneal_steps)
                rank = [
                    x + tau * gumbel(self.seed, self.layer, head, r.position) for x, r in zip(rank, rows, strict=True)
                ]
        positions = np.array([r.position for r in rows])
        protected = (positions < self.n_sink) | (positions >= offset - self.recent)
        gone = dropped(np.array(rank), positions, protected, len(rows) - self.budget)
        worst = max(rank[i] for i in gone)
        stay = [rank[i] for i in range(len(rows)) if i not in gone and not protected[i]]
        # equal scores decide by position on both sides: two untouched rows, or two bad ones, are no close call
        gaps = [x - worst for x in stay if not (x == worst and x in (0.0, -math.inf))]
        self.margin = min([self.margin, *gaps])
        self.heads[head] = [r for i, r in enumerate(rows) if i not in gone]


def layer_of(policy: Any, kv_heads: int, budget: int | None, **more: Any) -> Layer:
    """A Layer with the choices of a keyformer policy."""
    same = ("attention", "noise", "redraw", "tau_init", "tau_end", "anneal_steps", "window", "n_sink", "seed")
    choices = {name: getattr(policy, name) for name in same}
    recent = 0 if budget is None else policy.recent_rows(budget)
    return Layer(kv_heads, budget, recent=recent, **choices, **more)
