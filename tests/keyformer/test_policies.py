"""Policies: what they are by default, and one clear message for each value that cannot work."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyformer import H2O, POLICIES, Full, Keyformer, KeyformerKVCache, KeyformerProxy, Policy, Window, make_policy


def test_named_policies_are_the_specifications() -> None:
    """The table of ALGORITHM.md."""
    assert sorted(POLICIES) == ["full", "h2o", "keyformer", "keyformer_proxy", "window"]
    paper, h2o, proxy = Keyformer(), H2O(), KeyformerProxy()
    assert (paper.attention, paper.noise, paper.redraw, paper.n_sink) == ("query", "logit", True, 0)
    assert (paper.tau_init, paper.tau_end, paper.anneal_steps, paper.recent) == (1.0, 2.0, 128, 0.3)
    assert (h2o.attention, h2o.noise, h2o.n_sink, h2o.recent, h2o.window) == ("query", "none", 0, 0.5, 0)
    assert (proxy.attention, proxy.noise, proxy.n_sink, proxy.recent) == ("key", "select", 4, 0.25)
    assert (proxy.tau_init, proxy.tau_end) == (1.0, 1.0)
    assert (Window().attention, Window().n_sink) == ("none", 4)
    assert not Full().evicts
    assert all(POLICIES[name]().evicts for name in POLICIES if name != "full")
    with pytest.raises(dataclasses.FrozenInstanceError):
        paper.tau_end = 3.0  # type: ignore[misc]


CANNOT_WORK: list[tuple[dict[str, Any], str]] = [
    ({"attention": "keys"}, r"attention: expected 'query', 'key' or 'none', got 'keys'"),
    ({"noise": "gauss"}, r"noise: expected 'none', 'select' or 'logit', got 'gauss'"),
    (
        {"noise": "logit", "attention": "key"},
        r"noise: 'logit' needs attention 'query', got attention 'key'; use 'select'",
    ),
    ({"window": 3, "attention": "none"}, r"window: needs attention 'query', got attention 'none'; set window to 0"),
    ({"anneal_steps": -1}, r"anneal_steps: expected an integer of at least 0, got -1"),
    ({"anneal_steps": 1.0}, r"anneal_steps: expected an integer of at least 0, got 1.0"),
    ({"window": -1}, r"window: expected an integer of at least 0, got -1"),
    ({"window": 2.5}, r"window: expected an integer of at least 0, got 2.5"),
    ({"n_sink": -1}, r"n_sink: expected an integer of at least 0, got -1"),
    ({"n_sink": True}, r"n_sink: expected an integer of at least 0, got True"),
    ({"n_sink": "4"}, r"n_sink: expected an integer of at least 0, got '4'"),
    ({"seed": -1}, r"seed: expected an integer of at least 0, got -1"),
    ({"seed": 2**64}, r"seed: expected an integer below 2\*\*64, got 18446744073709551616"),
    ({"tau_init": math.nan}, r"tau_init: expected a finite number of at least 0, got nan"),
    ({"tau_init": -1}, r"tau_init: expected a finite number of at least 0, got -1"),
    ({"tau_init": "1"}, r"tau_init: expected a finite number of at least 0, got '1'"),
    ({"tau_end": math.inf}, r"tau_end: expected a finite number of at least 0, got inf"),
    ({"noise": "logit", "tau_init": 0}, r"tau_init: noise 'logit' divides by it, expected more than 0, got 0"),
    (
        {"tau_init": 2, "tau_end": 1.5, "anneal_steps": 8},
        r"tau_end: expected at least tau_init \(2\) when anneal_steps is set, got 1.5",
    ),
    ({"recent": 1.0}, r"recent: expected a number of rows or a fraction in \[0, 1\), got 1.0"),
    ({"recent": -0.1}, r"recent: expected a number of rows or a fraction in \[0, 1\), got -0.1"),
    ({"recent": math.nan}, r"recent: expected a number of rows or a fraction in \[0, 1\), got nan"),
    ({"recent": -1}, r"recent: expected an integer of at least 0, got -1"),
]


@pytest.mark.parametrize(("choices", "message"), CANNOT_WORK, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_what_cannot_work_is_refused_at_construction(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**choices)


def test_a_falling_temperature_is_fine_when_it_is_never_annealed() -> None:
    assert Policy(tau_init=2.0, tau_end=1.0).tau_init == 2.0


def test_unknown_names() -> None:
    with pytest.raises(
        ValueError, match="policy: expected one of full, window, h2o, keyformer, keyformer_proxy, got 'kf'"
    ):
        make_policy("kf")
    with pytest.raises(ValueError, match=r"policy h2o: unknown choice budget, sinks; expected some of .*n_sink.*seed"):
        make_policy("h2o", sinks=4, budget=3)
    assert make_policy("h2o", recent=3, window=5) == H2O(recent=3, window=5)
    with pytest.raises(ValueError, match="recent"):
        make_policy("window", recent=-2)


BUDGETS: list[tuple[Any, str]] = [
    (None, "budget: policy window needs a number of rows, got None"),
    (0, "budget: expected an integer of at least 1, got 0"),
    (-3, "budget: expected an integer of at least 1, got -3"),
    (8.9, "budget: expected an integer of at least 1, got 8.9"),
    (True, "budget: expected an integer of at least 1, got True"),
    (6, r"budget: expected more rows than are protected \(4 sinks \+ 2 recent\), got 6; use at least 7"),
]


@pytest.mark.parametrize(("budget", "message"), BUDGETS)
def test_a_budget_that_cannot_work_is_refused_by_the_cache(budget: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeyformerKVCache(Window(recent=2), budget)


def test_the_cache_takes_the_smallest_budget_and_the_full_policy_any() -> None:
    assert KeyformerKVCache(Window(recent=2), 7).budget == 7
    for budget in (None, 0, 5):
        assert KeyformerKVCache(Full(), budget).budget is None
    with pytest.raises(ValueError, match="prefill: expected 'full' or 'chunked', got 'half'"):
        KeyformerKVCache(Window(), 7, prefill="half")


def test_recent_as_rows_and_as_a_fraction() -> None:
    assert [H2O(recent=7).recent_rows(b) for b in (8, 100)] == [7, 7]
    assert [H2O().recent_rows(b) for b in (8, 100)] == [4, 50]
    assert [Keyformer().recent_rows(b) for b in (10, 100, 11)] == [3, 30, 3]
    assert H2O(recent=0.0).recent_rows(100) == 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(0, 20),
    st.one_of(st.integers(0, 30), st.floats(0, 0.99, allow_nan=False)),
)
def test_least_budget_is_the_smallest_that_works(n_sink: int, recent: int | float) -> None:
    policy = Window(n_sink=n_sink, recent=recent)
    least = policy.least_budget()
    policy.check_budget(least)
    for smaller in range(max(1, least - 30), least):
        with pytest.raises(ValueError, match="budget"):
            policy.check_budget(smaller)


@pytest.mark.parametrize(
    ("fraction", "tokens", "expected"),
    [
        (0.5, 100, (50, False)),
        (0.5, 101, (51, False)),
        (1.0, 37, (37, False)),
        (0.07, 100, (7, False)),  # 0.07 * 100 is a little more than 7 in binary
        (0.28, 25, (7, False)),
        (0.55, 100, (55, False)),
        (0.1, 70, (7, False)),
        (0.1, 60, (7, True)),  # 6 rows would be 4 sinks and 2 recent
        (0.001, 3, (7, True)),
        (0.1, 61, (7, False)),
        (0.1, 71, (8, False)),
    ],
)
def test_budget_rows_and_their_floor(fraction: float, tokens: int, expected: tuple[int, bool]) -> None:
    assert Window(recent=2).budget_rows(fraction, tokens) == expected


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5, 7, math.nan])
def test_a_fraction_outside_0_1_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"budget: expected a fraction in \(0, 1\] or a whole number of rows, got"):
        Window().budget_rows(fraction, 100)
