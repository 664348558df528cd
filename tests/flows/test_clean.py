"""The history of commands in Prefect's database."""

import datetime

import pytest
from prefect.client.orchestration import get_client
from prefect.testing.utilities import prefect_test_harness

from flows.runtime.console import PrefectConsole, PrivateFlow


@pytest.mark.nightly
def test_ended_flow_runs_go_from_the_database() -> None:
    """On a server of its own: other tests look at the runs of the shared one."""
    console, features = PrefectConsole(), PrivateFlow(lambda: "done", name="features")
    with prefect_test_harness(server_startup_timeout=300):
        for _ in range(3):
            features()
        now = datetime.datetime.now(datetime.UTC)
        assert console.clear_history(now - datetime.timedelta(days=1), dry_run=False) == 0
        assert console.clear_history(now, dry_run=True) == 3
        assert console.clear_history(now, dry_run=False) == 3
        with get_client(sync_client=True) as client:
            assert client.read_flow_runs() == []
