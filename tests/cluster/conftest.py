"""The desk of hosts that the fault tests share, and the table of what they measured."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest
from desk import Desk, Result
from network import Network

from tests.conftest import write_tiny_model

MEASURED = pytest.StashKey[list[tuple[str, float, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=int, default=1, help="run every fault test so many times")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MEASURED] = []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    times = metafunc.config.getoption("--times", 1)
    if "tidy_desk" in metafunc.fixturenames and times > 1:
        metafunc.fixturenames.append("time_of_many")
        metafunc.parametrize("time_of_many", range(1, times + 1))


@pytest.fixture(scope="session")
def whole_desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("needs root on Linux, for network namespaces")
    folder = tmp_path_factory.mktemp("desk")
    with Network(folder) as network:
        desk = Desk(network, write_tiny_model(folder / "tiny"))
        desk.start_head()
        desk.give_certificate(desk.desk)
        yield desk


@pytest.fixture
def tidy_desk(whole_desk: Desk) -> Desk:
    """Head up, three workers joined, no job anywhere."""
    whole_desk.tidy()
    return whole_desk


@pytest.fixture(scope="session")
def expected(whole_desk: Desk) -> dict[str, Result]:
    """What the same jobs give one after another, without a cluster."""
    return whole_desk.undisturbed()


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Call it with what was measured, the number and its unit; the numbers of one thing are printed in a row."""

    def measured(what: str, number: float, unit: str = "s") -> None:
        request.config.stash[MEASURED].append((what, number, unit))

    return measured


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[MEASURED]:
        terminalreporter.section("measured")
        for what, unit in dict.fromkeys((what, unit) for what, _, unit in config.stash[MEASURED]):
            numbers = ", ".join(f"{number:.3g}" for other, number, _ in config.stash[MEASURED] if other == what)
            terminalreporter.line(f"| {what} | {numbers} {unit} |")
