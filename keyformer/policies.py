"""Policies: which rows of a KV cache are worth keeping.

A policy is five independent choices (whose attention, noise, temperature, which queries count, what is protected);
each named policy below is a frozen dataclass that fixes them as its paper does. It holds no tensors:
`keyformer.cache` does the work.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar, Literal

_MOST_ROWS = 2**30  # twice as many still is an int32


def check_integer(name: str, value: object, least: int) -> None:
    """Raise ValueError unless `value` is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The five choices. Use a named policy below, or this class with choices of your own.

    Attributes:
        attention: whose attention scores a row: "query", the model's real queries, summed over the query heads of a
            KV head; "key", each incoming key as its own query (a proxy that needs no hook); "none", position alone.
        noise: "none"; "select": score + tau * g at the decision, g frozen per position; "logit": mass =
            softmax((logit + g) / tau).
        redraw: for "logit": noise drawn anew per (query, row), or frozen per row.
        tau_init, tau_end, anneal_steps: temperature, from tau_init to tau_end over anneal_steps steps (0: constant
            tau_init). A step is a decoded token, 0 in the prompt; for "key" attention it is the number of tokens
            inserted before.
        window: the last `window` queries count; 0 counts all of them.
        n_sink: first rows of the sequence, never evicted.
        recent: last rows, never evicted: a number of rows, or a fraction of the budget in [0, 1).
        seed: seed of the noise.

    Raises:
        ValueError: a value that cannot work, with what was expected.
    """

    name: ClassVar[str] = "custom"
    evicts: ClassVar[bool] = True
    attention: Literal["query", "key", "none"] = "query"
    noise: Literal["none", "select", "logit"] = "none"
    redraw: bool = True
    tau_init: float = 1.0
    tau_end: float = 1.0
    anneal_steps: int = 0
    window: int = 0
    n_sink: int = 0
    recent: int | float = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.attention not in ("query", "key", "none"):
            raise ValueError(f"attention: expected 'query', 'key' or 'none', got {self.attention!r}.")
        if self.noise not in ("none", "select", "logit"):
            raise ValueError(f"noise: expected 'none', 'select' or 'logit', got {self.noise!r}.")
        if self.noise == "logit" and self.attention != "query":
            raise ValueError(f"noise: 'logit' needs attention 'query', got attention {self.attention!r}; use 'select'.")
        if self.attention != "query" and self.window:
            raise ValueError(f"window: needs attention 'query', got attention {self.attention!r}; set window to 0.")
        for name, least in (("anneal_steps", 0), ("window", 0), ("n_sink", 0), ("seed", 0)):
            check_integer(name, getattr(self, name), least)
        if not isinstance(self.redraw, bool):
            raise ValueError(f"redraw: expected true or false, got {self.redraw!r}.")
        if self.seed >= 2**64:
            raise ValueError(f"seed: expected an integer below 2**64, got {self.seed}.")
        for name in ("tau_init", "tau_end"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{name}: expected a finite number of at least 0, got {value!r}.")
        if self.noise == "logit" and self.tau_init <= 0:
            raise ValueError(f"tau_init: noise 'logit' divides by it, expected more than 0, got {self.tau_init}.")
        if self.anneal_steps and self.tau_end < self.tau_init:
            raise ValueError(
                f"tau_end: expected at least tau_init ({self.tau_init}) when anneal_steps is set, got {self.tau_end}."
            )
        if isinstance(self.recent, float):
            if not 0 <= self.recent < 1:
                raise ValueError(f"recent: expected a number of rows or a fraction in [0, 1), got {self.recent!r}.")
        else:
            check_integer("recent", self.recent, 0)
        for name in ("window", "n_sink", "recent"):
            if getattr(self, name) > _MOST_ROWS:
                raise ValueError(f"{name}: expected at most {_MOST_ROWS} rows, got {getattr(self, name)}.")

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
        if not 0 < fraction <= 1:
            raise ValueError(f"budget: expected a fraction in (0, 1] or a whole number of rows, got {fraction!r}.")
        # rounded first: 0.07 * 100 is 7.000000000000001
        rows, least = math.ceil(round(fraction * tokens, 9)), self.least_budget()
        return max(rows, least), rows < least

    def check_budget(self, budget: int) -> None:
        """Raise ValueError unless `budget` is an integer number of rows that leaves one to evict."""
        if not self.evicts:
            return
        check_integer("budget", budget, 1)
        if budget > _MOST_ROWS:
            raise ValueError(f"budget: expected at most {_MOST_ROWS} rows, got {budget}.")
        recent = self.recent_rows(budget)
        if self.n_sink + recent >= budget:
            raise ValueError(
                f"budget: expected more rows than are protected ({self.n_sink} sinks + {recent} recent), got {budget}; "
                f"use at least {self.least_budget()} or protect fewer rows."
            )


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keeps every row: the reference every other policy is measured against. The budget is ignored."""

    name: ClassVar[str] = "full"
    evicts: ClassVar[bool] = False
    attention: Literal["query", "key", "none"] = "none"


@dataclass(frozen=True, kw_only=True)
class Window(Policy):
    """The first `n_sink` rows and the most recent ones (a sliding window; Xiao et al., StreamingLLM, ICLR 2024).

    4 sinks by default, as mlx-lm's own RotatingKVCache keeps; kept rows stay at their true positions.
    """

    name: ClassVar[str] = "window"
    attention: Literal["query", "key", "none"] = "none"
    n_sink: int = 4


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
    """

    name: ClassVar[str] = "keyformer"
    noise: Literal["none", "select", "logit"] = "logit"
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
    attention: Literal["query", "key", "none"] = "key"
    noise: Literal["none", "select", "logit"] = "select"
    n_sink: int = 4
    recent: int | float = 0.25


POLICIES: dict[str, type[Policy]] = {p.name: p for p in (Full, Window, H2O, Keyformer, KeyformerProxy)}


def make_policy(name: str, **choices: object) -> Policy:
    """The policy of that name with some choices changed, as a configuration file gives them.

    Raises:
        ValueError: unknown name or choice, or a value that cannot work.
    """
    if name not in POLICIES:
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {name!r}.")
    known = POLICIES[name].__dataclass_fields__
    unknown = sorted(set(choices) - set(known))
    if unknown:
        raise ValueError(f"policy {name}: unknown choice {', '.join(unknown)}; expected some of {', '.join(known)}.")
    return POLICIES[name](**choices)  # type: ignore[arg-type]
