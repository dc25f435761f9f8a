"""Policies: what they are by default, one worked example each, and one clear message for what cannot work."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import attend, kept_positions, kept_scores

from keyformer import (
    H2O,
    POLICIES,
    Full,
    KeyDiff,
    Keyformer,
    KeyformerKVCache,
    KeyformerProxy,
    Knorm,
    Policy,
    Random,
    SnapKV,
    Streaming,
    Tova,
    Window,
    make_policy,
    noise,
)

NAMES = "full, window, streaming, random, h2o, keyformer, keyformer_proxy, tova, snapkv, knorm, keydiff"


def test_named_policies_are_the_specifications() -> None:
    """The table of ALGORITHM.md and the papers' own settings."""
    assert ", ".join(POLICIES) == NAMES
    paper, h2o, proxy, snapkv = Keyformer(), H2O(), KeyformerProxy(), SnapKV()
    assert (paper.attention, paper.noise, paper.distribution, paper.redraw) == ("query", "logit", "gumbel", True)
    assert (paper.tau_init, paper.tau_end, paper.anneal_steps) == (1.0, 2.0, 128)
    assert (paper.n_sink, paper.recent) == (0, 0.3)
    assert (h2o.attention, h2o.noise, h2o.n_sink, h2o.recent, h2o.window) == ("query", "none", 0, 0.5, 0)
    assert (proxy.attention, proxy.noise, proxy.n_sink, proxy.recent) == ("key", "select", 4, 0.25)
    assert (proxy.tau_init, proxy.tau_end) == (1.0, 1.0)
    assert (Window().attention, Window().noise, Window().n_sink) == ("none", "none", 0)
    assert (Streaming().attention, Streaming().noise, Streaming().n_sink) == ("none", "none", 4)
    assert (Random().attention, Random().noise) == ("none", "select")
    assert (Random().n_sink, Random().recent) == (paper.n_sink, paper.recent)  # its control protects the same rows
    assert (Tova().attention, Tova().noise, Tova().window, Tova().n_sink, Tova().recent) == ("query", "none", 1, 0, 0)
    assert (snapkv.attention, snapkv.noise, snapkv.window, snapkv.recent, snapkv.pooling) == (
        "query",
        "none",
        32,
        32,
        7,
    )
    assert (Knorm().attention, KeyDiff().attention) == ("norm", "difference")
    assert not Full().evicts
    assert all(POLICIES[name]().evicts for name in POLICIES if name != "full")
    for name, policy in POLICIES.items():
        changed = {"noise", "tau_end", "anneal_steps", "window", "pooling"}
        for field in dataclasses.fields(policy()):
            if field.name not in changed | {"attention", "n_sink", "recent"}:
                assert getattr(policy(), field.name) == getattr(Policy(), field.name), (name, field.name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        paper.tau_end = 3.0  # type: ignore[misc]


# One head of size 1 (or more), scale 1. A query of ln 2 gives a row with key k the weight 2**k.
LN2 = math.log(2)
KEYS = [2.0, 0.0, 1.0, 0.0]  # weights 4, 1, 2, 1


def after_prompt(
    policy: Policy, budget: int | None, keys: list[Any], query: float = LN2
) -> tuple[KeyformerKVCache, list[int], list[float]]:
    """The cache after a prompt of those keys and its end; positions and scores of the rows it kept."""
    k = mx.array(keys).reshape(1, 1, len(keys), -1)
    cache = KeyformerKVCache(policy, budget)
    cache.begin_prefill()
    attend(cache, mx.full(k.shape, query), k, k, 1.0)
    cache.end_prefill()
    return cache, kept_positions(cache)[0], kept_scores(cache)[0]


def test_full_keeps_everything() -> None:
    assert after_prompt(Full(), None, KEYS)[1] == [0, 1, 2, 3]


def test_window_keeps_the_last_rows() -> None:
    assert after_prompt(Window(), 3, KEYS)[1] == [1, 2, 3]
    assert after_prompt(Window(n_sink=1), 3, KEYS)[1] == [0, 2, 3]


def test_streaming_keeps_four_sinks_and_the_last_rows() -> None:
    assert after_prompt(Streaming(), 6, [0.0] * 9)[1] == [0, 1, 2, 3, 7, 8]


def test_random_keeps_the_rows_with_the_highest_draws() -> None:
    """Seed 1 draws 2.62, 2.13, 1.17, -0.41, 0.32. Of budget 3 round(0.9) = 1 row is protected, the last; of the others
    those with -0.41 and 1.17 go.
    """
    drawn = noise.gumbel(1, 0, mx.array(0), mx.arange(5)).tolist()
    assert drawn == pytest.approx([2.62, 2.13, 1.17, -0.41, 0.32], abs=0.006)
    assert after_prompt(Random(seed=1), 3, [0.0] * 5)[1] == [0, 1, 4]


def test_h2o_keeps_what_all_queries_looked_at() -> None:
    """Masses by query: 1 | 4/5 1/5 | 4/7 1/7 2/7 | 4/8 1/8 2/8 1/8. Of budget 3 the last 2 rows are protected, and row
    1 has less than row 0.
    """
    _, rows, scores = after_prompt(H2O(), 3, KEYS)
    assert rows == [0, 2, 3]
    assert scores == pytest.approx([1 + 4 / 5 + 4 / 7 + 4 / 8, 2 / 7 + 2 / 8, 1 / 8], abs=1e-6)
    # the noise-free arm softmax(x/T): at temperature 2 a query of twice the size gives the same masses
    assert after_prompt(H2O(tau_init=2.0), 3, KEYS, query=2 * LN2)[2] == pytest.approx(scores, abs=1e-6)
    # with decay 1/2 the queries count 1/8, 1/4, 1/2, 1
    _, rows, scores = after_prompt(H2O(decay=0.5), 3, KEYS)
    assert rows == [0, 2, 3]
    assert scores == pytest.approx([1 / 8 + 1 / 5 + 2 / 7 + 4 / 8, 1 / 7 + 2 / 8, 1 / 8], abs=1e-6)


def test_keyformer_keeps_what_noisy_queries_looked_at() -> None:
    """Keys of 0: plain masses are 1 | 1/2 1/2 | 1/3 1/3 1/3, and row 2 would go. Seed 3 draws, by query, anything |
    3.2687 1.1920 | -0.4135 1.5350 4.8310, so the masses are 1 | .8886 .1114 | .0051 .0355 .9594: row 1 goes.
    """
    for query, expected in ((1, [3.2687, 1.1920]), (2, [-0.4135, 1.5350, 4.8310])):
        drawn = noise.gumbel(3, 0, mx.array(0), mx.arange(query + 1), mx.array(query)).tolist()
        assert drawn == pytest.approx(expected, abs=1e-4)
    _, rows, scores = after_prompt(Keyformer(seed=3, recent=0), 2, [0.0] * 3)
    assert rows == [0, 2]
    assert scores == pytest.approx([1.8937, 0.9594], abs=2e-4)
    # the arms without noise and with a constant: 1 + 1/2 + 1/3, 1/2 + 1/3, 1/3
    for arm in ({"noise": "none"}, {"distribution": "constant"}):
        _, rows, scores = after_prompt(Keyformer(seed=3, recent=0, **arm), 2, [0.0] * 3)
        assert rows == [0, 1]
        assert scores == pytest.approx([11 / 6, 5 / 6], abs=1e-6)


def test_keyformer_proxy_keeps_what_later_keys_looked_at() -> None:
    """Keys ln 2, 0, 1. Row 0 starts with 1; key 0 sees row 0 alone: 2; key 1 has weights 2 and 1: row 0 has 2.667,
    row 1 .333, the new row 0. Seed 3 draws .42, .13, 2.10, and row 1 goes; without noise it would be row 2.
    """
    assert noise.gumbel(3, 0, mx.array(0), mx.arange(3)).tolist() == pytest.approx([0.42, 0.13, 2.10], abs=0.005)
    _, rows, scores = after_prompt(KeyformerProxy(seed=3, n_sink=0, recent=0), 2, [LN2, 0.0, 1.0])
    assert rows == [0, 2]
    assert scores == pytest.approx([8 / 3, 0], abs=1e-6)
    assert after_prompt(KeyformerProxy(tau_init=0, n_sink=0, recent=0), 2, [LN2, 0.0, 1.0])[1] == [0, 1]


def test_tova_keeps_what_the_last_query_looked_at() -> None:
    """The last query gives 4/8, 1/8, 2/8, 1/8: of the two eighths the first goes. Decoding, a query of -ln 2 turns the
    weights round: rows 0, 2, 3 and the new one, of key 3, have 1/4, 1/2, 1, 1/8, and the new one goes itself.
    """
    cache, rows, scores = after_prompt(Tova(), 3, KEYS)
    assert rows == [0, 2, 3]
    assert scores == pytest.approx([4 / 8, 2 / 8, 1 / 8], abs=1e-6)
    attend(cache, mx.full((1, 1, 1, 1), -LN2), *[mx.full((1, 1, 1, 1), 3.0)] * 2, 1.0)
    assert kept_positions(cache)[0] == [0, 2, 3]
    assert kept_scores(cache)[0] == pytest.approx([2 / 15, 4 / 15, 8 / 15], abs=1e-6)


def test_snapkv_keeps_the_neighbours_of_what_the_last_queries_looked_at() -> None:
    """The last two queries give 15/14, 15/56, 15/28, 1/8. Averages of three: (15/14 + 15/56)/2 = .670 at the end,
    (15/14 + 15/56 + 15/28)/3 = .625, (15/56 + 15/28 + 1/8)/3 = .310. Row 3 is protected, row 2 goes; without pooling it
    would be row 1.
    """
    _, rows, scores = after_prompt(SnapKV(window=2, pooling=3, recent=1), 3, KEYS)
    assert rows == [0, 1, 3]
    assert scores == pytest.approx([15 / 14, 15 / 56, 1 / 8], abs=1e-6)  # what is stored is not averaged
    assert after_prompt(SnapKV(window=2, pooling=1, recent=1), 3, KEYS)[1] == [0, 2, 3]


def test_knorm_keeps_short_keys() -> None:
    """Norms 5, 1, 2, 3: the two longest go, whatever their direction."""
    assert after_prompt(Knorm(), 2, [[3.0, -4.0], [0.0, 1.0], [-2.0, 0.0], [0.0, 3.0]])[1] == [1, 2]


def test_keydiff_keeps_unusual_keys() -> None:
    """Directions east, east, north, east: their mean is (3, 1) / 4, and cosines with it are 3, 3, 1, 3 over sqrt 10.
    The northern key stays; of the equal ones the first two go, whatever their length.
    """
    assert after_prompt(KeyDiff(), 2, [[1.0, 0.0], [0.5, 0.0], [0.0, 8.0], [4.0, 0.0]])[1] == [2, 3]


CANNOT_WORK: list[tuple[dict[str, Any], str]] = [
    ({"attention": "keys"}, r"attention: expected 'query', 'key', 'norm', 'difference' or 'none', got 'keys'"),
    ({"noise": "gauss"}, r"noise: expected 'none', 'select' or 'logit', got 'gauss'"),
    (
        {"noise": "logit", "attention": "key"},
        r"noise: 'logit' needs attention 'query', got attention 'key'; use 'select'",
    ),
    ({"distribution": "normal"}, r"distribution: expected 'gumbel', 'gaussian' or 'constant', got 'normal'"),
    ({"normalize": True}, r"normalize: expected 'none' or 'count', got True"),
    ({"redraw": "yes"}, r"redraw: expected true or false, got 'yes'"),
    ({"decay": 0}, r"decay: expected a number in \(0, 1\], got 0"),
    ({"decay": 1.5}, r"decay: expected a number in \(0, 1\], got 1.5"),
    ({"decay": math.nan}, r"decay: expected a number in \(0, 1\], got nan"),
    ({"decay": True}, r"decay: expected a number in \(0, 1\], got True"),
    ({"pooling": 0}, r"pooling: expected an integer of at least 1, got 0"),
    ({"pooling": 4}, r"pooling: expected an odd number of at most 255 rows, got 4"),
    ({"pooling": 257}, r"pooling: expected an odd number of at most 255 rows, got 257"),
    ({"anneal_steps": -1}, r"anneal_steps: expected an integer of at least 0, got -1"),
    ({"anneal_steps": 1.0}, r"anneal_steps: expected an integer of at least 0, got 1.0"),
    ({"window": -1}, r"window: expected an integer of at least 0, got -1"),
    ({"window": 2.5}, r"window: expected an integer of at least 0, got 2.5"),
    ({"n_sink": -1}, r"n_sink: expected an integer of at least 0, got -1"),
    ({"n_sink": True}, r"n_sink: expected an integer of at least 0, got True"),
    ({"n_sink": "4"}, r"n_sink: expected an integer of at least 0, got '4'"),
    ({"seed": -1}, r"seed: expected an integer of at least 0, got -1"),
    ({"seed": 2**64}, r"seed: expected an integer below 2\*\*64, got 18446744073709551616"),
    ({"tau_end": 1e31}, r"tau_end: expected a finite number from 0 to 1e\+30"),
    ({"recent": "30%"}, r"recent: expected .* a fraction of the budget in \[0, 1\) like 0.3, got '30%'"),
    ({"window": 4097}, r"window: expected at most 4096, got 4097"),
    ({"anneal_steps": 2**31}, r"anneal_steps: expected at most 2147483647"),
    ({"tau_init": math.nan}, r"tau_init: expected a finite number from 0 to 1e\+30, got nan"),
    ({"tau_init": -1}, r"tau_init: expected a finite number from 0 to 1e\+30, got -1"),
    ({"tau_init": "1"}, r"tau_init: expected a finite number from 0 to 1e\+30, got '1'"),
    ({"tau_end": math.inf}, r"tau_end: expected a finite number from 0 to 1e\+30, got inf"),
    ({"noise": "logit", "tau_init": 0}, r"tau_init: the logits are divided by it, expected at least 1e-06, got 0"),
    ({"tau_init": 1e-9}, r"tau_init: the logits are divided by it, expected at least 1e-06, got 1e-09"),
    (
        {"tau_init": 2, "tau_end": 1.5, "anneal_steps": 8},
        r"tau_end: expected at least tau_init \(2\) when anneal_steps is set, got 1.5",
    ),
    ({"recent": 1.0}, r"recent: expected .* or a fraction of the budget in \[0, 1\) like 0.3, got 1.0"),
    ({"recent": -0.1}, r"recent: expected .* or a fraction of the budget in \[0, 1\) like 0.3, got -0.1"),
    ({"recent": math.nan}, r"recent: expected .* or a fraction of the budget in \[0, 1\) like 0.3, got nan"),
    ({"recent": -1}, r"recent: expected a whole number of rows.*got -1"),
]


@pytest.mark.parametrize(("choices", "message"), CANNOT_WORK, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_what_cannot_work_is_refused_at_construction(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**choices)


OTHERS = ("key", "norm", "difference", "none")
NO_EFFECT: list[tuple[dict[str, Any], str, str]] = [
    *[
        ({"attention": a} | choice, next(iter(choice)), f"needs attention 'query', got {a!r}")
        for a in OTHERS
        for choice in ({"window": 3}, {"decay": 0.9}, {"normalize": "count"}, {"pooling": 3})
    ],
    *[
        ({"attention": a} | choice, next(iter(choice)), "needs noise or attention 'query', got noise 'none'")
        for a in OTHERS
        for choice in ({"tau_init": 0.5}, {"tau_end": 2.0}, {"anneal_steps": 3})
    ],
    ({"window": 3, "decay": 0.9}, "decay", "cannot be combined with a window, got window 3"),
    ({"window": 1, "normalize": "count"}, "normalize", "each row is seen by the one query of window 1"),
    ({"distribution": "gaussian"}, "distribution", "needs noise, got noise 'none'"),
    ({"redraw": False}, "redraw", "only noise 'logit' can be redrawn, got noise 'none'"),
    ({"noise": "select", "redraw": False}, "redraw", "only noise 'logit' can be redrawn, got noise 'select'"),
    ({"noise": "select", "distribution": "constant"}, "distribution", "a constant added to every score changes no"),
    ({"noise": "logit", "distribution": "constant", "redraw": False}, "redraw", "a constant is the same however"),
    *[
        ({"attention": "none", "noise": "select"} | choice, next(iter(choice)), "the noise is all there is to a score")
        for choice in ({"tau_init": 2.0}, {"distribution": "gaussian"}, {"tau_end": 0.5}, {"anneal_steps": 9})
    ],
]


@pytest.mark.parametrize(("choices", "name", "why"), NO_EFFECT, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_a_choice_without_effect_is_refused_at_construction(choices: dict[str, Any], name: str, why: str) -> None:
    default = getattr(Policy(), name)
    with pytest.raises(ValueError, match=f"^{name}: {why}.*; set {name} to {default!r}, got {choices[name]!r}"):
        Policy(**choices)
    Policy(**{**choices, name: default})  # the advice works


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Policy) if f.name not in ("attention", "seed")])
def test_the_full_policy_takes_no_choice(name: str) -> None:
    other = {"noise": "select", "redraw": False, "distribution": "gaussian", "normalize": "count", "decay": 0.5}
    with pytest.raises(ValueError, match=f"{name}: policy 'full' keeps every row; set {name} to"):
        Full(**{name: other.get(name, 3)})
    assert Full(seed=7).seed == 7


def test_a_falling_temperature_is_fine_when_it_is_never_annealed() -> None:
    assert Policy(tau_init=2.0, tau_end=1.0).tau_init == 2.0


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=f"policy: expected one of {NAMES}, got 'kf'"):
        make_policy("kf")
    with pytest.raises(ValueError, match=r"policy h2o: unknown choice budget, sinks; expected some of .*n_sink.*seed"):
        make_policy("h2o", sinks=4, budget=3)
    assert make_policy("h2o", recent=3, window=5) == H2O(recent=3, window=5)
    with pytest.raises(ValueError, match="recent"):
        make_policy("window", recent=-2)


BUDGETS: list[tuple[Any, str]] = [
    (None, "budget: policy streaming needs a number of rows, got None"),
    (0, "budget: expected an integer of at least 1, got 0"),
    (-3, "budget: expected an integer of at least 1, got -3"),
    (8.9, "budget: expected an integer of at least 1, got 8.9"),
    (True, "budget: expected an integer of at least 1, got True"),
    (6, r"budget: expected more rows than are protected \(4 sinks \+ 2 recent\), got 6; use at least 7"),
]


@pytest.mark.parametrize(("budget", "message"), BUDGETS)
def test_a_budget_that_cannot_work_is_refused_by_the_cache(budget: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeyformerKVCache(Streaming(recent=2), budget)


def test_the_cache_takes_the_smallest_budget_and_the_full_policy_any() -> None:
    assert KeyformerKVCache(Streaming(recent=2), 7).budget == 7
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
    assert Streaming(recent=2).budget_rows(fraction, tokens) == expected


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5, 7, math.nan])
def test_a_fraction_outside_0_1_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"budget: expected a fraction in \(0, 1\] or a whole number of rows, got"):
        Window().budget_rows(fraction, 100)
