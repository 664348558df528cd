"""What all tests share: quiet libraries, few threads, and the folder of real data where it is at hand."""

import atexit
import os
import sqlite3
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import mlflow.store.db.utils as mlflow_tables
import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

from flows.runtime.environment import quiet_libraries, set_environment
from pipeline.jobs.ingest import checks
from pipeline.jobs.training.rank.group import start_group
from pipeline.processes import forkserver
from pipeline.training.config import TrainConfig
from tests.sharing import session_folder

set_environment()
# Tests call flows from Python, as users may: Prefect's client then starts a server. Commands set the variable again.
del os.environ["PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"]
os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"
quiet_libraries()
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_AUTH_TOKEN"] = "0123456789abcdef" * 2  # one for all clusters: a process keeps the first that it uses
forkserver.MOST_SERVERS = 8  # the modules that tests start processes of; each start costs six seconds of CPU
FORKED = (
    "pipeline.jobs.training.rank.main",
    "pipeline.preprocessing.executors",
    "pipeline.jobs.recurring.backtest_rank",
    "pipeline.study.measure.rank",
)
"""Modules of our processes, which import much the same."""
ROOT = Path(__file__).resolve().parent.parent
DEVICE: Any = os.environ.setdefault("DLRM_TEST_DEVICE", "cpu")
"""Where trainers inside the tests' own process train; `make test-gpu` says `cuda`."""
SHARED = ROOT.parent / "shared" / "data"


_server_of = forkserver._server


def _share_server(modules: Sequence[str], root: Path, environment: Mapping[str, str]) -> forkserver.ForkServer:
    """One fork server for all of them."""
    return _server_of(FORKED if set(modules) <= set(FORKED) else modules, root, environment)


pytest.MonkeyPatch().setattr(forkserver, "_server", _share_server)


_make_tables = mlflow_tables._initialize_tables
_TABLES = sqlite3.connect(":memory:", check_same_thread=False)
_TABLES_LOCK = threading.Lock()


def _copy_tables(engine: Any) -> None:
    """MLflow makes the tables of a new database by fifty migrations, a second of CPU. It does so once for each tester.

    Every further SQLite database is a copy of that one. Commands that tests start make their own.
    """
    if engine.dialect.name != "sqlite":
        _make_tables(engine)
        return
    with _TABLES_LOCK, closing(engine.raw_connection()) as connection:
        if not _TABLES.execute("SELECT * FROM sqlite_master").fetchone():
            _make_tables(engine)
            connection.driver_connection.backup(_TABLES)
        else:
            _TABLES.backup(connection.driver_connection)


pytest.MonkeyPatch().setattr(mlflow_tables, "_initialize_tables", _copy_tables)


@atexit.register
def _end_quietly() -> None:
    """DuckDB prints a page about leaks when the interpreter is torn down after a flow."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.fixture(autouse=True)
def one_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lets tests with the mark `cluster` run one at a time: several at once starve each other on two processors."""
    with ExitStack() as stack:
        if request.node.get_closest_marker("cluster") is not None:
            stack.enter_context(FileLock(session_folder(tmp_path_factory) / "cluster.lock"))
        yield


@pytest.fixture(autouse=True)
def few_figures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ingests of small tables draw no figure, which takes longer than all else. Those of their flow's tests do."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path != ROOT / "tests" / "flows" / "test_ingest.py":
            patch.setattr(checks, "_draw", lambda *_: None)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves all but one in n cases of a test with the mark `one_in(n)` to `make nightly`, whatever their order."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("one_in") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for of in cases.values():
        for number, item in enumerate(sorted(of, key=lambda one: one.nodeid)):
            mark = item.get_closest_marker("one_in")
            assert mark is not None
            if number % mark.args[0]:
                item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the data sets that are not part of the project."""
    folder = Path(os.environ.get("DLRM_DATA", SHARED))
    if not (folder / "ml100k").exists():
        pytest.skip(f"needs the data sets of the README below {folder}; set DLRM_DATA")
    return folder


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.device]:
    """This process as a group of one rank. Processes that it starts later must not meet where it did."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("DLRM_MEETING", str(tmp_path_factory.mktemp("meeting") / "store"))
        device = start_group(TrainConfig(world_size=1, device=DEVICE), 0)
    yield device
    dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)
