"""How many rows each layer keeps: one budget for all, a pyramid, or weights of your own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from .policies import Policy, check_integer

_BETA = 20


def allocate(how: str | Sequence[float], budget: int, layers: int, policy: Policy) -> list[int]:
    """Rows per KV head for each layer, `budget` on average: they add up to exactly budget * layers.

    "pyramid" is PyramidKV (Cai et al., 2024): a line that falls from the first layer to the last,

        rows of the last layer  = budget / beta,  beta = 20
        rows of the first layer = 2 * budget - budget / beta.

    Weights give each layer its share of the total. Shares are rounded by largest remainder (ties to the first layer). A
    layer that would get less than `policy.least_budget()` gets that, and the others share what is left in proportion.
    PyramidKV lays its line over the rows beyond an observation window that every layer keeps, and bounds it by the
    prompt; here the line is of whole budgets, and protected rows given as a fraction follow the layer's budget.

    Args:
        how: "uniform", "pyramid", or one positive weight for each layer.
        budget: mean rows per layer.
        layers: number of layers that evict.
        policy: what protects rows, and so says how few a layer can do with.

    Raises:
        ValueError: an unknown name, weights that are not positive and finite or not one per layer, a budget that
            protects everything, or a layer with more rows than a cache can hold.
    """
    check_integer("layers", layers, 1)
    check_integer("budget", budget, 1)
    policy.check_budget(budget)
    if not isinstance(how, str):
        weights = _weights(how, layers)
    elif how == "uniform":
        weights = [Fraction(1)] * layers
    elif how == "pyramid":
        last = Fraction(1, _BETA)
        weights = [2 - last - (2 - 2 * last) * Fraction(layer, max(layers - 1, 1)) for layer in range(layers)]
    else:
        raise ValueError(f"allocate: expected 'uniform', 'pyramid' or one weight per layer, got {how!r}.")
    rows = _share(weights, budget * layers, policy.least_budget())
    for most in rows:
        policy.check_budget(most)
    return rows


def _weights(how: Sequence[float], layers: int) -> list[Fraction]:
    weights = list(how)
    for weight in weights:
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight <= 0:
            raise ValueError(f"allocate: expected positive numbers as weights, got {weight!r}.")
    if len(weights) != layers:
        raise ValueError(f"allocate: expected {layers} weights, one for each layer that evicts, got {len(weights)}.")
    return [Fraction(weight) for weight in weights]


def _share(weights: list[Fraction], total: int, least: int) -> list[int]:
    """`total` split in proportion to the weights, each share at least `least`; total >= least * len(weights)."""
    above = dict(enumerate(weights))
    while True:
        left, whole = total - least * (len(weights) - len(above)), sum(above.values())
        below = [layer for layer, weight in above.items() if weight * left < least * whole]
        if not below:
            break
        for layer in below:
            del above[layer]
    exact = {layer: weight * left / whole for layer, weight in above.items()}
    rows = [math.floor(exact.get(layer, Fraction(least))) for layer in range(len(weights))]
    by_remainder = sorted(above, key=lambda layer: (rows[layer] - exact[layer], layer))
    for layer in by_remainder[: total - sum(rows)]:
        rows[layer] += 1
    return rows
