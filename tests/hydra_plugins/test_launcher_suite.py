"""Hydra's own tests of a launcher, against ours."""

from __future__ import annotations

import pytest
from dask_processes import Cluster
from hydra.test_utils.launcher_common_tests import LauncherTestSuite


@pytest.fixture
def overrides(two_hosts: Cluster) -> list[str]:
    return [f"hydra.launcher.head='{two_hosts.address}'"]


@pytest.mark.parametrize("launcher_name", ["dask"])
class TestDaskLauncher(LauncherTestSuite):
    pass
