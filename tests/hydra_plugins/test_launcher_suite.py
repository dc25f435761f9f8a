"""Hydra's own tests of a launcher, against ours."""

from __future__ import annotations

import pytest
from dask_processes import Cluster
from hydra.core.singleton import Singleton
from hydra.test_utils.launcher_common_tests import LauncherTestSuite
from hydra.version import VersionBase

pytestmark = pytest.mark.hosts


@pytest.fixture(autouse=True)
def no_version_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite is written for programs that name no `version_base`, whatever a test before it has set."""
    monkeypatch.delitem(Singleton._instances, VersionBase, raising=False)


@pytest.fixture
def overrides(two_hosts: Cluster) -> list[str]:
    return [f"hydra.launcher.head='{two_hosts.address}'"]


@pytest.mark.parametrize("launcher_name", ["dask"])
class TestDaskLauncher(LauncherTestSuite):
    pass
