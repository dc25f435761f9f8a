"""conf/policy: one file for each policy, with the library's defaults."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from keyformer import POLICIES, make_policy

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "policy"


def test_every_policy_has_a_file() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(POLICIES)


@pytest.mark.parametrize("name", POLICIES)
def test_a_file_says_what_the_library_does_by_itself(name: str) -> None:
    choices = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))
    assert isinstance(choices, dict)
    assert choices["name"] == name
    assert make_policy(**choices) == POLICIES[name]()
