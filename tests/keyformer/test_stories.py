"""Whatever happens to a model's caches, layers that decide in groups come out as layers alone do."""

from __future__ import annotations

import pytest
from mlx_lm.models import llama
from small import KINDS
from stories import LAYERS, Story, compare, spied


@pytest.fixture(scope="module")
def model() -> llama.Model:
    return spied()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_a_life_in_groups_is_a_life_alone(seed: int, kind: str, model: llama.Model) -> None:
    alone, grouped = (Story(seed, kind, sizes, model).tell(24) for sizes in ([1], range(1, LAYERS + 1)))
    compare(alone, grouped)
