"""The three tiers of tests, and what of the tree is collected without the extras."""

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

NEEDS_RAY = [
    "pipeline/jobs/evaluation/ray_parallel.py",
    "pipeline/preprocessing/ray_executor.py",
    "pipeline/training/launch/ray_group.py",
]
"""Modules of the product whose examples can run only where Ray is."""
LATER = {"slow", "nightly", "gpu"}
"""Marks of tests that `make check` leaves out."""
PROCESSOR_SECONDS = "processor_seconds"

collect_ignore = [] if find_spec("ray") else NEEDS_RAY


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """What tests share has no examples, and some of it cannot be imported without an extra."""
    inside = Path(__file__).parent / "tests" in collection_path.parents
    shared = collection_path.suffix == ".py" and not collection_path.name.startswith(("test_", "conftest"))
    return True if inside and shared else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast-seconds",
        type=float,
        help="fail if a test without a mark of a later tier takes more processor time than this",
    )


def pytest_configure(config: pytest.Config) -> None:
    limit = config.getoption("--fast-seconds")
    if limit is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FastTests(limit))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Notes the processor time of a test and of the processes below it: a busy machine adds nothing to it."""
    if item.config.getoption("--fast-seconds") is None:
        return (yield)
    begun = _processor_seconds()
    try:
        return (yield)
    finally:
        item.user_properties.append((PROCESSOR_SECONDS, _processor_seconds() - begun))


def _processor_seconds() -> float:
    """Returns the seconds of this process, of all that live below it, and of those that each of them has waited for."""
    found = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            found += used.user + used.system + used.children_user + used.children_system
    return found


class FastTests:
    """Fails a session in which a fast test was slow.

    Args:
        limit: Most seconds of processor time that a fast test itself may take. What sets it up may serve other tests
            and is not counted.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.slow = limit, dict[str, float]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and not LATER & report.keywords.keys():
            seconds = float(str(dict(report.user_properties)[PROCESSOR_SECONDS]))
            if seconds > self.limit:
                self.slow[report.nodeid] = seconds

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.slow and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, seconds in sorted(self.slow.items(), key=lambda one: -one[1]):
            terminalreporter.line(f"slower than a fast test may be: {seconds:.1f} s, {name}. Mark it slow or nightly.")
