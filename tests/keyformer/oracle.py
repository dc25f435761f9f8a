"""One layer's cache in float64 NumPy, written from ALGORITHM.md: plain loops over heads, queries and rows.

It shares no code with `keyformer`. It follows the eviction too, so it says at each call what that call attends to.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WORD = 0xFFFFFFFF
MEAN, DEVIATION = 0.57721566490153286, math.sqrt(math.pi**2 / 6)


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


def draw(distribution: str, seed: int, layer: int, head: int, position: int, query: int | None = None) -> float:
    """The noise arms: the same uniform number through two distribution functions, or the mean of both."""
    if distribution == "constant":
        return MEAN
    if distribution == "gaussian":
        u = uniform(hashed(seed, layer, head, position, query))
        return statistics.NormalDist(MEAN, DEVIATION).inv_cdf(u)
    return gumbel(seed, layer, head, position, query)


def temperature(step: int, tau_init: float, tau_end: float, anneal_steps: int) -> float:
    if anneal_steps == 0:
        return tau_init
    return tau_init + min(step, anneal_steps) * (tau_end - tau_init) / anneal_steps


# -- arithmetic --------------------------------------------------------------------------------------------------------


def softmax(x: np.ndarray, sink: float | None = None) -> np.ndarray:
    """With a sink: one more logit, whose share is not returned."""
    x = x if sink is None else np.append(x, sink)
    e = np.exp(x - x.max())
    return (e / e.sum())[: len(x) - (sink is not None)]


def capped(logits: np.ndarray, soft_cap: float | None) -> np.ndarray:
    return logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)


def mass(
    queries: np.ndarray,
    keys: np.ndarray,
    scale: float,
    allowed: np.ndarray,
    added: np.ndarray,
    noise: np.ndarray | None = None,
    tau: float = 1.0,
    weight: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    soft_cap: float | None = None,
) -> np.ndarray:
    """[B, Hkv, S, n]: what each query gives to each row, summed over the query heads of the KV head.

    Args:
        queries, keys: [B, Hq, S, D] and [B, Hkv, n, D].
        allowed, added: [B, Hq, S, n], which rows a query sees, and what is added to the logits.
        noise: [B, Hq, S, n] or None.
        weight: [B, S], how much each query counts.
        sinks: [Hq], a logit of each query head that takes a share.
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
        logits = capped(keys[b, kv, seen] @ queries[b, h, i] * scale, soft_cap) + added[b, h, i, seen]
        if noise is not None:
            logits = logits + noise[b, h, i, seen]
        given = softmax(logits / tau, None if sinks is None else sinks[h] / tau)
        out[b, kv, i, seen] += given if weight is None else given * weight[b, i]
    return out


def counted(age: int, window: int = 0, decay: float = 1.0) -> float:
    """How much the query `age` queries before the last one counts."""
    return 0.0 if window and age >= window else decay**age


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
    """One sequence, one layer. `recent` and `n_sink` are rows; the other choices are named as in ALGORITHM.md.

    `sinks` (one logit per query head) and `soft_cap` belong to the model: its attention has them, so the scores do.
    """

    kv_heads: int
    budget: int | None  # None: everything stays
    attention: str = "query"
    noise: str = "none"
    distribution: str = "gumbel"
    redraw: bool = True
    tau_init: float = 1.0
    tau_end: float = 1.0
    anneal_steps: int = 0
    window: int = 0
    decay: float = 1.0
    normalize: str = "none"
    pooling: int = 1
    n_sink: int = 0
    recent: int = 0
    seed: int = 0
    layer: int = 0
    prefill: str = "full"
    sinks: np.ndarray | None = None
    soft_cap: float | None = None

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
                        logits = capped(np.array([r.key @ q[h, i] * scale for r in seen]), self.soft_cap)
                        out[h, i] = softmax(logits, self._sink(h)) @ np.array([r.value for r in seen])
                    if self.attention == "query":
                        self._give(seen, logits, h, first + i, tau, np.isfinite(q[h, i]).all())
            (self.waiting if self.attention == "key" else self.heads)[head].extend(new)
        self.offset += S
        if self.attention == "query":
            for row in (r for head in self.heads for r in head):
                row.score = sum(
                    m * counted(self.offset - 1 - p, self.window, self.decay) for p, m in row.masses.items()
                )
        return out

    def _sink(self, head: int) -> float | None:
        return None if self.sinks is None else float(self.sinks[head])

    def _give(self, seen: list[Row], logits: np.ndarray, head: int, query: int, tau: float, asks: bool) -> None:
        """One query's mass."""
        sink = self._sink(head)
        if self.noise == "logit":
            asking = query if self.redraw else None
            g = [draw(self.distribution, self.seed, self.layer, head, r.position, asking) for r in seen]
            logits = logits + np.array(g)
        if self.noise != "select":
            logits = logits / tau
            sink = None if sink is None else sink / tau
        good = [i for i, r in enumerate(seen) if not r.bad]
        if not good or not asks:
            return
        for i, m in zip(good, softmax(logits[good], sink), strict=True):
            seen[i].masses[query] = seen[i].masses.get(query, 0.0) + m

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
        rank = self.rank(head, rows, offset)
        positions = np.array([r.position for r in rows])
        protected = (positions < self.n_sink) | (positions >= offset - self.recent)
        gone = dropped(np.array(rank), positions, protected, len(rows) - self.budget)
        worst = max(rank[i] for i in gone)
        stay = [rank[i] for i in range(len(rows)) if i not in gone and not protected[i]]
        # equal scores decide by position on both sides: two untouched rows, or two bad ones, are no close call
        gaps = [x - worst for x in stay if not (x == worst and x in (0.0, -math.inf))]
        self.margin = min([self.margin, *gaps])
        self.heads[head] = [r for i, r in enumerate(rows) if i not in gone]

    def rank(self, head: int, rows: list[Row], offset: int) -> list[float]:
        """What the decision compares, for rows in any order."""
        good = [r for r in sorted(rows, key=lambda r: r.position) if not r.bad]
        if self.attention == "none":
            value = [0.0] * len(good)
        elif self.attention == "norm":
            value = [-math.sqrt(sum(float(x) ** 2 for x in r.key)) for r in good]
        elif self.attention == "difference":
            directions = [_direction(r.key) for r in good]
            mean = _direction(np.mean(directions, axis=0)) if good else np.zeros(0)
            value = [-float(d @ mean) for d in directions]
        else:
            value = [r.score for r in good]
        if self.normalize == "count":
            for i, r in enumerate(good):
                value[i] /= sum(counted(age, self.window, self.decay) for age in range(offset - r.position))
        half = self.pooling // 2
        value = [float(np.mean(value[max(0, i - half) : i + half + 1])) for i in range(len(good))]
        if self.noise == "select":
            step = self.step if self.attention == "query" else offset - 1
            tau = temperature(step, self.tau_init, self.tau_end, self.anneal_steps)
            for i, r in enumerate(good):
                value[i] += tau * draw(self.distribution, self.seed, self.layer, head, r.position)
        of = {r.position: x for r, x in zip(good, value, strict=True)}
        return [of.get(r.position, -math.inf) for r in rows]


def _direction(key: np.ndarray) -> np.ndarray:
    """A vector of length 1, or 0."""
    key = key.astype(np.float64)
    length = math.sqrt(key @ key)
    return key / length if length else key


def layer_of(policy: Any, kv_heads: int, budget: int | None, **more: Any) -> Layer:
    """A Layer with the choices of a keyformer policy."""
    same = ("attention", "noise", "distribution", "redraw", "tau_init", "tau_end", "anneal_steps")
    same += ("window", "decay", "normalize", "pooling", "n_sink", "seed")
    choices = {name: getattr(policy, name) for name in same}
    recent = 0 if budget is None else policy.recent_rows(budget)
    return Layer(kv_heads, budget, recent=recent, **choices, **more)
