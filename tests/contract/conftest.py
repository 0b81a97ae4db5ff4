"""Runs every test of the contract on each family in both dtypes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.contract.cases import DTYPES, Case, prepare
from tests.contract.families import FAMILIES, QUICK, Family


def all_cases(choose: Callable[[Family], bool] = lambda _: True) -> list[Any]:
    """Returns one parameter for each family chosen and each dtype; all but a quick subset marked slow."""
    return [
        pytest.param(
            (name, dtype),
            id=f"{name}-{dtype}",
            marks=() if name in QUICK and dtype == "float32" else pytest.mark.slow,
        )
        for name, family in FAMILIES.items()
        if choose(family)
        for dtype in DTYPES
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A ``case`` is any family in either dtype, ``generating`` one that has ``generate``."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", all_cases(), indirect=True)
    if "generating" in metafunc.fixturenames:
        metafunc.parametrize("generating", all_cases(lambda family: family.generates), indirect=True)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    name, dtype = request.param
    return prepare(name, DTYPES[dtype])


@pytest.fixture
def generating(request: pytest.FixtureRequest) -> Case:
    name, dtype = request.param
    return prepare(name, DTYPES[dtype])


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tensors of a few thousand numbers: a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what the contract took: its tests, with their preparation."""
    reports = [
        report
        for group in terminalreporter.stats.values()
        for report in group
        if isinstance(report, pytest.TestReport) and report.nodeid.startswith("tests/contract/")
    ]
    if reports:
        count = len({report.nodeid for report in reports})
        terminalreporter.write_line(f"contract: {count} tests in {sum(r.duration for r in reports):.0f} s")
