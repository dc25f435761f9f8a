"""Schedulers and workers for the tests of the Dask launcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dask_processes import Cluster

from pipeline import embedded_server


@pytest.fixture(scope="session")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A scheduler with two workers, for tests that leave them as they are."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start_scheduler()
        cluster.start_worker("mac1")
        cluster.start_worker("mac2")
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster to be broken; nothing of it runs yet."""
    (tmp_path / "cluster").mkdir()
    cluster = Cluster(tmp_path / "cluster")
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def mlflow_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real MLflow server."""
    folder = tmp_path_factory.mktemp("tracking") / "mlflow"
    yield embedded_server.start(folder, port=21250)
    embedded_server.stop(folder)
