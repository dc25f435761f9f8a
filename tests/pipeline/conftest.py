"""A real MLflow server for the tests of tracking and report, started by the code under test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import embedded_server

TEST_PORT = 5250  # away from the port of a server somebody may be using


@pytest.fixture(scope="session")
def server_outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An outputs folder (with a name that needs quoting) whose embedded server is up."""
    outputs = tmp_path_factory.mktemp("out puts %20?")
    embedded_server.start(outputs / "mlflow", port=TEST_PORT)
    yield outputs
    assert embedded_server.stop(outputs / "mlflow"), "the server had gone before the tests ended"


@pytest.fixture
def uri(server_outputs: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of that server, in a process whose environment tries to lead astray."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_RUN_ID", "0123456789abcdef0123456789abcdef")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "someone else's")
    address = embedded_server.running(server_outputs / "mlflow")
    assert address is not None
    return address
