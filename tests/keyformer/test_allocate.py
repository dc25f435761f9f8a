"""Rows per layer: exact totals, floors, shapes, and what cannot work."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyformer import H2O, KeyformerProxy, SnapKV, Window
from keyformer.allocate import allocate

POLICIES = [Window(), Window(n_sink=4, recent=3), H2O(), H2O(recent=0.9), KeyformerProxy(), SnapKV()]


def test_worked_examples() -> None:
    """Budget 100: the last of 5 layers gets 100/20 = 5, the first 200 - 5 = 195, the others lie on the line between."""
    assert allocate("pyramid", 100, 5, Window()) == [195, 148, 100, 52, 5]  # 147.5 and 52.5: one row goes to the first
    assert allocate("uniform", 100, 3, Window()) == [100, 100, 100]
    assert allocate([1, 2, 1], 100, 3, Window()) == [75, 150, 75]
    assert allocate([1, 1, 1.0], 100, 3, Window()) == [100, 100, 100]
    assert allocate("pyramid", 100, 1, Window()) == [100]
    assert allocate("pyramid", 100, 2, Window()) == [195, 5]


def test_worked_example_of_the_floor() -> None:
    """Shares 78, 59, 40, 21, 2 of 200 rows. SnapKV needs 33 rows in a layer: the last two get them, and the others
    share 134 as 78 : 59 : 40, that is 59.05, 44.67, 30.28. Now the third is short as well: 101 are left for 78 : 59.
    """
    assert allocate("pyramid", 40, 5, SnapKV()) == [58, 43, 33, 33, 33]  # 57.50, 43.496: the row goes to the first
    assert allocate("pyramid", 33, 5, SnapKV()) == [33] * 5


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_totals_floors_and_proportions(data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from(POLICIES))
    layers = data.draw(st.integers(1, 80))
    least = policy.least_budget()
    budget = least + data.draw(st.one_of(st.integers(0, 30), st.integers(0, 5000)))
    weight = st.one_of(st.integers(1, 1000), st.floats(1e-3, 1e3))
    how: Any = data.draw(
        st.one_of(st.sampled_from(["uniform", "pyramid"]), st.lists(weight, min_size=layers, max_size=layers))
    )
    rows = allocate(how, budget, layers, policy)
    assert all(type(r) is int for r in rows)
    assert len(rows) == layers
    assert sum(rows) == budget * layers
    assert min(rows) >= least
    for r in rows:
        policy.check_budget(r)
    if how == "uniform":
        assert set(rows) == {budget}
    elif how == "pyramid":
        assert rows == sorted(rows, reverse=True)
        if min(rows) > least:
            assert rows[0] == pytest.approx(2 * budget - budget / 20, abs=1) or layers == 1
            assert rows[-1] == pytest.approx(budget / 20, abs=1) or layers == 1
    else:
        # some factor makes max(least, factor * weight) add up to the total; rounding moves a layer by less than a row
        low, high = 0.0, 2 * budget * layers / min(how)
        for _ in range(200):
            factor = (low + high) / 2
            total = math.fsum(max(least, factor * w) for w in how)
            low, high = (factor, high) if total < budget * layers else (low, factor)
        for r, w in zip(rows, how, strict=True):
            assert abs(r - max(least, high * w)) < 1 + 1e-6
        # a heavier layer never gets less
        for i, j in zip(range(layers), range(1, layers), strict=False):
            if how[i] > how[j]:
                assert rows[i] >= rows[j]


CANNOT_WORK: list[tuple[Any, Any, Any, str]] = [
    ("cone", 10, 3, r"allocate: expected 'uniform', 'pyramid' or one weight per layer, got 'cone'"),
    ([1, 2], 10, 3, r"allocate: expected 3 weights, one for each layer that evicts, got 2"),
    ([], 10, 3, r"allocate: expected 3 weights, one for each layer that evicts, got 0"),
    ([1, 0, 1], 10, 3, r"allocate: expected positive numbers as weights, got 0"),
    ([1, -2.5, 1], 10, 3, r"allocate: expected positive numbers as weights, got -2.5"),
    ([1, math.nan, 1], 10, 3, r"allocate: expected positive numbers as weights, got nan"),
    ([1, math.inf, 1], 10, 3, r"allocate: expected positive numbers as weights, got inf"),
    ([1, "2", 1], 10, 3, r"allocate: expected positive numbers as weights, got '2'"),
    ([1, True, 1], 10, 3, r"allocate: expected positive numbers as weights, got True"),
    ("uniform", 10, 0, r"layers: expected an integer of at least 1, got 0"),
    ("uniform", 2.5, 3, r"budget: expected an integer of at least 1, got 2.5"),
    ("uniform", None, 3, r"budget: expected an integer of at least 1, got None"),
    ("pyramid", 6, 3, r"budget: expected more rows than are protected \(4 sinks \+ 2 recent\), got 6; use at least 7"),
    ("pyramid", 2**30, 3, r"budget: expected at most 1073741824 rows, got 2093796557"),
]


@pytest.mark.parametrize(("how", "budget", "layers", "message"), CANNOT_WORK)
def test_what_cannot_work_is_refused(how: Any, budget: Any, layers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocate(how, budget, layers, Window(n_sink=4, recent=2))
