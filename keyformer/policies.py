"""Policies: which rows of a KV cache are worth keeping.

A policy is five independent choices (whose attention, noise, temperature, which queries count, what is protected);
each named policy below is a frozen dataclass that fixes them as its paper does. It holds no tensors:
`keyformer.scores` measures, `keyformer.ranking` ranks, `keyformer.cache` stores and evicts.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

Attention = Literal["query", "key", "norm", "difference", "none"]
Noise = Literal["none", "select", "logit"]
Distribution = Literal["gumbel", "gaussian", "constant"]
Normalize = Literal["none", "count"]

_CHOICES = {"attention": Attention, "noise": Noise, "distribution": Distribution, "normalize": Normalize}
_MOST_ROWS = 2**30  # twice as many still is an int32
_MOST_STEPS = 2**31 - 1
_MOST_QUERIES = 4096  # counted one by one: each costs a row 4 bytes per head
_MOST_POOLED = 255
_MOST_TAU = 1e30  # times the largest noise it still is a float32
_LEAST_DIVISOR = 1e-6  # logits divided by less leave float32


def check_integer(name: str, value: object, least: int) -> None:
    """Raise ValueError unless `value` is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The five choices. Use a named policy below, or this class with choices of your own.

    Attributes:
        attention: what scores a row. "query": the mass the model's real queries give it, summed over the query heads of
            a KV head; "key": each incoming key as its own query (a proxy that needs no hook); "norm": -||k||, short
            keys stay; "difference": -cos(k, mean of the stored keys' directions), unusual keys stay; "none": 0 for
            every row, so that position (or noise) alone decides. A tie always costs the row of lowest position.
        noise: "none"; "select": score + tau * g at the decision, g frozen per position; "logit": mass =
            softmax((logit + g) / tau).
        distribution: of g. "gumbel", standard; "gaussian", of the same mean and standard deviation; "constant", that
            mean.
        redraw: for "logit": noise drawn anew per (query, row), or frozen per row.
        tau_init, tau_end, anneal_steps: temperature, from tau_init to tau_end over anneal_steps steps (0: constant
            tau_init). A step is a decoded token, 0 in the prompt; for other attentions than "query" it is the number of
            tokens inserted before. It multiplies g of noise "select" and divides the logits of "query" attention
            otherwise: with noise "none" their mass is softmax(logit / tau), the noise-free arm.
        window: the last `window` queries count; 0 counts all of them.
        decay: each query counts `decay` times as much as the one after it; 1 counts all alike.
        normalize: "count" divides a score by the number of counted queries that could see the row (with a decay: by
            what they count), so that early rows have no advantage.
        pooling: an odd number of rows: a score is averaged over so many temporal neighbours, the row in their middle; 1
            averages nothing.
        n_sink: first rows of the sequence, never evicted.
        recent: last rows, never evicted: a number of rows, or a fraction of the budget in [0, 1).
        seed: seed of the noise.

    Raises:
        ValueError: a value that cannot work, or a choice that has no effect beside the others, with what was expected.
    """

    name: ClassVar[str] = "custom"
    evicts: ClassVar[bool] = True
    attention: Attention = "query"
    noise: Noise = "none"
    distribution: Distribution = "gumbel"
    redraw: bool = True
    tau_init: float = 1.0
    tau_end: float = 1.0
    anneal_steps: int = 0
    window: int = 0
    decay: float = 1.0
    normalize: Normalize = "none"
    pooling: int = 1
    n_sink: int = 0
    recent: int | float = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            *most, last = (repr(choice) for choice in get_args(kind))
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name}: expected {', '.join(most)} or {last}, got {getattr(self, name)!r}.")
        if self.noise == "logit" and self.attention != "query":
            raise ValueError(f"noise: 'logit' needs attention 'query', got attention {self.attention!r}; use 'select'.")
        for name, least in (("anneal_steps", 0), ("window", 0), ("pooling", 1), ("n_sink", 0), ("seed", 0)):
            check_integer(name, getattr(self, name), least)
        if not isinstance(self.redraw, bool):
            raise ValueError(f"redraw: expected true or false, got {self.redraw!r}.")
        if self.seed >= 2**64:
            raise ValueError(f"seed: expected an integer below 2**64, got {self.seed}.")
        if self.pooling % 2 == 0 or self.pooling > _MOST_POOLED:
            raise ValueError(f"pooling: expected an odd number of at most {_MOST_POOLED} rows, got {self.pooling}.")
        if not _is_number(self.decay) or not 0 < self.decay <= 1:
            raise ValueError(f"decay: expected a number in (0, 1], got {self.decay!r}.")
        self._check_temperature()
        rows = isinstance(self.recent, int) and not isinstance(self.recent, bool) and self.recent >= 0
        if not rows and not (isinstance(self.recent, float) and 0 <= self.recent < 1):
            raise ValueError(
                f"recent: expected a whole number of rows, or a fraction of the budget in [0, 1) like 0.3, got "
                f"{self.recent!r}."
            )
        bounds = {"window": _MOST_QUERIES, "anneal_steps": _MOST_STEPS, "n_sink": _MOST_ROWS, "recent": _MOST_ROWS}
        for name, bound in bounds.items():
            if getattr(self, name) > bound:
                raise ValueError(f"{name}: expected at most {bound}, got {getattr(self, name)}.")
        self._check_use()

    def _check_temperature(self) -> None:
        for name in ("tau_init", "tau_end"):
            value = getattr(self, name)
            if not _is_number(value) or not math.isfinite(value) or not 0 <= value <= _MOST_TAU:
                raise ValueError(f"{name}: expected a finite number from 0 to {_MOST_TAU:g}, got {value!r}.")
        if self.attention == "query" and self.noise != "select" and self.tau_init < _LEAST_DIVISOR:
            raise ValueError(
                f"tau_init: the logits are divided by it, expected at least {_LEAST_DIVISOR}, got {self.tau_init}."
            )
        if self.anneal_steps and self.tau_end < self.tau_init:
            raise ValueError(
                f"tau_end: expected at least tau_init ({self.tau_init}) when anneal_steps is set, got {self.tau_end}."
            )

    def _check_use(self) -> None:
        """Refuse choices that cannot matter beside the others. A seed is always welcome: sweeps give one to all."""
        tau = ("tau_init", "tau_end", "anneal_steps")
        if not self.evicts:
            idle = [f.name for f in fields(self) if f.name not in ("attention", "seed")]
            self._refuse(idle, f"policy {self.name!r} keeps every row")
        if self.attention != "query":
            self._refuse(
                ("window", "decay", "normalize", "pooling"), f"needs attention 'query', got {self.attention!r}"
            )
        if self.noise == "none":
            self._refuse(("distribution",), "needs noise, got noise 'none'")
        if self.noise != "logit":
            self._refuse(("redraw",), f"only noise 'logit' can be redrawn, got noise {self.noise!r}")
        if self.noise == "none" and self.attention != "query":
            self._refuse(tau, f"needs noise or attention 'query', got noise 'none', attention {self.attention!r}")
        if self.noise == "select" and self.attention == "none":
            self._refuse(
                ("distribution", *tau), "the noise is all there is to a score, its size and shape change no rank"
            )
        if self.distribution == "constant":
            self._refuse(("redraw",), "a constant is the same however often it is drawn")
            if self.noise == "select":
                self._refuse(("distribution",), "a constant added to every score changes no rank, use noise 'none'")
        if self.window:
            self._refuse(("decay",), f"cannot be combined with a window, got window {self.window}")
        if self.window == 1:
            self._refuse(("normalize",), "each row is seen by the one query of window 1")

    def _refuse(self, names: Iterable[str], why: str) -> None:
        for name in names:
            default, value = getattr(Policy, name), getattr(self, name)
            if value != default:
                raise ValueError(f"{name}: {why}; set {name} to {default!r}, got {value!r}.")

    def recent_rows(self, budget: int) -> int:
        """Protected last rows at this budget."""
        return round(self.recent * budget) if isinstance(self.recent, float) else self.recent

    def least_budget(self) -> int:
        """The smallest budget with a row that can be evicted: sinks + recent + 1."""
        most = (
            (self.n_sink + 2) / (1 - self.recent) + 2
            if isinstance(self.recent, float)
            else self.n_sink + self.recent + 2
        )
        # rows that are not protected as recent never fall as the budget grows
        return bisect_right(range(math.ceil(most)), self.n_sink, key=lambda budget: budget - self.recent_rows(budget))

    def budget_rows(self, fraction: float, tokens: int) -> tuple[int, bool]:
        """Rows kept per KV head for a fraction of `tokens` prompt tokens; whether the floor `least_budget()` applied.

        Raises:
            ValueError: fraction outside (0, 1].
        """
        if not _is_number(fraction) or not 0 < fraction <= 1:
            raise ValueError(f"budget: expected a fraction in (0, 1] or a whole number of rows, got {fraction!r}.")
        # rounded first: 0.07 * 100 is 7.000000000000001
        rows, least = math.ceil(round(fraction * tokens, 9)), self.least_budget()
        return max(rows, least), rows < least

    def check_budget(self, budget: int) -> None:
        """Raise ValueError unless `budget` is an integer number of rows that leaves one to evict."""
        if not self.evicts:
            return
        if isinstance(budget, float) and 0 < budget <= 1:
            raise ValueError(
                f"budget: expected an integer number of rows, got {budget!r}; a fraction of a prompt is "
                f"policy.budget_rows({budget!r}, len(prompt))[0] rows."
            )
        check_integer("budget", budget, 1)
        if budget > _MOST_ROWS:
            raise ValueError(f"budget: expected at most {_MOST_ROWS} rows, got {budget}.")
        recent = self.recent_rows(budget)
        if self.n_sink + recent >= budget:
            raise ValueError(
                f"budget: expected more rows than are protected ({self.n_sink} sinks + {recent} recent), got {budget}; "
                f"use at least {self.least_budget()} or protect fewer rows."
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keeps every row: the reference every other policy is measured against. The budget is ignored."""

    name: ClassVar[str] = "full"
    evicts: ClassVar[bool] = False
    attention: Attention = "none"


@dataclass(frozen=True, kw_only=True)
class Window(Policy):
    """The last rows only: every score is 0, and the row of lowest position goes.

    The window baseline of the Keyformer paper (Adnan et al., MLSys 2024). It holds the rows of mlx-lm's
    RotatingKVCache(max_size=budget + 1, keep=n_sink), also when `n_sink` first rows are kept besides.
    """

    name: ClassVar[str] = "window"
    attention: Attention = "none"


@dataclass(frozen=True, kw_only=True)
class Streaming(Policy):
    """Attention sinks and the last rows: the first 4 rows are never evicted, of the others the oldest goes.

    Xiao et al., StreamingLLM, ICLR 2024. The paper counts positions within the cache, which is the cache's option
    positions="contiguous" and no part of a policy: with the cache's default, "original", rows stay at their true
    positions, as in mlx-lm's RotatingKVCache(max_size=budget + 1, keep=4).
    """

    name: ClassVar[str] = "streaming"
    attention: Attention = "none"
    n_sink: int = 4


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """A random choice of rows, the last 30 % of the budget protected: what `keyformer` must beat.

    score = g, frozen per (KV head, position): the row with the lowest draw goes. No paper's method but its control: the
    same protected rows as `keyformer`, nothing learnt from attention. A row's draw never changes, so the rows kept are
    at every time a uniform sample of those that could be evicted.
    """

    name: ClassVar[str] = "random"
    attention: Attention = "none"
    noise: Noise = "select"
    recent: int | float = 0.3


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Heavy hitters: score = sum over queries of softmax(q.k / sqrt(D)), the recent half of the budget protected.

    Zhang et al., H2O, NeurIPS 2023. Per KV head: the query heads of a group are summed.
    """

    name: ClassVar[str] = "h2o"
    recent: int | float = 0.5


@dataclass(frozen=True, kw_only=True)
class Keyformer(Policy):
    """score = sum over queries of softmax((q.k / sqrt(D) + g) / tau), g Gumbel(0, 1), tau from 1 to 2 in decoding.

    Adnan et al., Keyformer, MLSys 2024: equations 9 and 10, noise redrawn as in the released code, the last 30 % of
    the budget protected. We differ from that code where it departs from its paper: rows are freed, scores are per
    sequence, and a token leaving the recent window competes to stay. `anneal_steps` is the paper's T; its code uses
    max_new_tokens, 128.

    The arms of the paper's ablation: `redraw=False` (its algorithm 1 draws once), `distribution="gaussian"`,
    `distribution="constant"`, and `noise="none"`, which is softmax(q.k / sqrt(D) / tau) and with tau_end=1 plain mass.
    A constant cannot change a softmax, so its arm equals `noise="none"` here; the paper reports it as far worse.
    """

    name: ClassVar[str] = "keyformer"
    noise: Noise = "logit"
    tau_end: float = 2.0
    anneal_steps: int = 128
    recent: int | float = 0.3


@dataclass(frozen=True, kw_only=True)
class KeyformerProxy(Policy):
    """Each incoming key stands for its query; noise is frozen per position and added at the decision: score + tau * g.

    The adaptation of the seed document (VeloxQuant-MLX): needs no hook in the model's attention. A new row starts at
    score 0 and would go next, so, unlike there, the last 25 % of the budget are protected.
    """

    name: ClassVar[str] = "keyformer_proxy"
    attention: Attention = "key"
    noise: Noise = "select"
    n_sink: int = 4
    recent: int | float = 0.25


@dataclass(frozen=True, kw_only=True)
class Tova(Policy):
    """The row to which the last query gives least goes: score = softmax(q_last.k / sqrt(D)).

    Oren et al., "Transformers are multi-state RNNs", EMNLP 2024. Nothing is protected; a new row has its own query's
    mass when it first competes. The paper averages over all heads of a layer and evicts one token from all of them;
    here each KV head decides for itself, by the sum over its query heads.
    """

    name: ClassVar[str] = "tova"
    window: int = 1


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """score = average over 7 neighbours of the mass that the last 32 queries give; the last 32 rows are protected.

    Li et al., SnapKV, NeurIPS 2024. The paper selects once, at the end of the prompt, and keeps whatever is decoded;
    here the same rule goes on while decoding, so memory stays fixed. Its code pools the rows before the window, counts
    zeros beyond the ends and lets each query head select; here the rows of the window are neighbours too, an average is
    over the neighbours that exist, and the query heads of a KV head select together. Budgets of fewer than 33 rows need
    a smaller `recent`.
    """

    name: ClassVar[str] = "snapkv"
    window: int = 32
    pooling: int = 7
    recent: int | float = 32


@dataclass(frozen=True, kw_only=True)
class Knorm(Policy):
    """Short keys stay: score = -||k||, the Euclidean norm.

    Devoto et al., "A simple and effective L2 norm-based strategy for KV cache compression", EMNLP 2024. RoPE turns keys
    and leaves their norm, so positions do not matter. The paper spares the first layers; here every layer evicts
    (`allocate` gives a layer more rows). Needs no hook in the model's attention.
    """

    name: ClassVar[str] = "knorm"
    attention: Attention = "norm"


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
    """Unusual keys stay: score = -cos(k, m), m the mean of k / ||k|| over the stored rows of the KV head.

    Park et al., KeyDiff, NeurIPS 2025. Keys are compared as attention reads them, rotated. m is taken anew at each
    eviction, of the rows that are stored then. Prefill "chunked" is the paper's way. Needs no hook in the model's
    attention.
    """

    name: ClassVar[str] = "keydiff"
    attention: Attention = "difference"


POLICIES: dict[str, type[Policy]] = {
    p.name: p for p in (Full, Window, Streaming, Random, H2O, Keyformer, KeyformerProxy, Tova, SnapKV, Knorm, KeyDiff)
}
NO_QUERIES = sorted(name for name, kind in POLICIES.items() if kind.attention != "query")  # they need no hook


def make_policy(name: str, **choices: object) -> Policy:
    """The policy of that name with some choices changed, as a configuration file gives them.

    Raises:
        ValueError: unknown name or choice, or a value that cannot work.
    """
    if name not in POLICIES:
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {name!r}.")
    known = [field.name for field in fields(POLICIES[name])]
    unknown = sorted(set(choices) - set(known))
    if unknown:
        raise ValueError(f"policy {name}: unknown choice {', '.join(unknown)}; expected some of {', '.join(known)}.")
    return POLICIES[name](**choices)  # type: ignore[arg-type]
