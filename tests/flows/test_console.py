"""What Prefect's pages show of the smoke run, apart from its log."""

import datetime
import logging
import socket
import sqlite3
import time
from contextlib import closing, suppress

import pytest
import yaml
from prefect import Flow, tags
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run, task_run
from prefect.settings import (
    PREFECT_API_DATABASE_CONNECTION_URL,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)

from flows.runtime.console import TAG, PrefectConsole, PrivateFlow, RunPage, model_asset, table_asset
from pipeline.config import load
from pipeline.config.files import ROOT
from pipeline.jobs.console import Progress, Step
from tests.homes import CONFIG


def shown(key: str) -> list:
    """Returns the artifacts with a key, from all runs of this session."""
    with get_client(sync_client=True) as client:
        return client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))


def test_the_page_shows_quality_and_links_to_mlflow_and_the_report(smoke, page):
    texts = page["report-smoke"]
    assert any("- evaluation: NE " in text and "smoke version 1 (champion)" in text for text in texts)
    run = smoke["mlflow_run_id"]
    assert any(f"/runs/{run})" in text for text in page["mlflow-smoke"])
    assert any(f"/runs/{run}/artifacts/report.html)" in text for text in page["html-report-smoke"])


@pytest.mark.parametrize("stage", ["generate", "ingest", "train", "evaluate"])
def test_no_bar_of_finished_work_stays_on_a_page(page, stage):
    assert f"progress-{stage}" not in page


@pytest.mark.parametrize("fails", [False, True])
def test_a_bar_shows_how_far_work_is_and_stays_if_it_fails(prefect, monkeypatch, fails):
    monkeypatch.setattr("flows.runtime.console.SECONDS_BETWEEN_LINES", 0.05)
    key, logger = f"progress-stage-{fails}".lower(), logging.getLogger("test")

    def figures() -> list[float]:
        return [float(one.data) for one in shown(key)]

    def work() -> None:
        with Progress(logger, page=RunPage(logger, "rows")) as progress:
            progress(f"stage {fails}", 5, 10)
            deadline = time.monotonic() + 90
            while figures() != [50.0] and time.monotonic() < deadline:
                time.sleep(0.1)
            assert figures() == [50.0]
            if fails:
                raise ValueError

    with suppress(ValueError):
        work()
    assert figures() == ([50.0] if fails else [])


def test_an_unreachable_server_does_not_delay_the_work(prefect, caplog):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}/api"
    caplog.set_level(logging.DEBUG, "test")
    logger = logging.getLogger("test")
    away = {PREFECT_API_URL: address, PREFECT_CLIENT_MAX_RETRIES: 0}
    with suppress(ValueError), temporary_settings(away), Progress(logger, page=RunPage(logger, "rows")) as progress:
        progress("train", 5, 10)
        raise ValueError
    assert any(line.startswith("progress of train is not on the run's page: ") for line in caplog.messages)


def test_each_table_and_model_is_one_asset():
    config = load(CONFIG, {"registration.model_name": "a model"})
    assert table_asset(config).key == "iceberg://dlrm/smoke"
    assert model_asset(config).key == "mlflow://models/a-model"


def test_the_model_is_derived_from_the_table(smoke_run):
    """Lineage as Prefect's server stores it."""
    assert "iceberg://dlrm/smoke" in smoke_run["assets"]
    assert "iceberg://dlrm/smoke" in smoke_run["assets"]["mlflow://models/smoke"]


@pytest.mark.slow
def test_history_of_our_flows_alone_is_cleared(prefect):
    """Other projects may use the same server, also with flows of the same names."""
    database = PREFECT_API_DATABASE_CONNECTION_URL.value().removeprefix("sqlite+aiosqlite:///")
    foreign = [Flow(lambda: None, name=name) for name in ("billing", "train")]
    ours = PrivateFlow(lambda: None, name="end-to-end")
    runs = [one(return_state=True).state_details.flow_run_id for one in (*foreign, ours)]  # type: ignore[attr-defined]
    with get_client(sync_client=True) as client:
        with closing(sqlite3.connect(database, timeout=60)) as connection, connection:  # the server knows only today
            old = "UPDATE flow_run SET end_time = '2001-01-01 00:00:00.000000' WHERE id IN (?, ?, ?)"
            assert connection.execute(old, [str(run) for run in runs]).rowcount == 3
        before = datetime.datetime(2001, 1, 2, tzinfo=datetime.UTC)
        assert [PrefectConsole().clear_history(before, dry_run) for dry_run in (True, False, False)] == [1, 1, 0]
        assert [client.read_flow_run(run).id for run in runs[:2]] == runs[:2]
        with pytest.raises(ObjectNotFound):
            client.read_flow_run(runs[2])


def test_our_tag_is_on_the_flow_run_alone(prefect):
    """Prefect asks the server for the limit of each tag before a task. Those of the user count."""

    def look(holder: None) -> list[set[str]]:
        return [set(flow_run.tags), set(task_run.tags)]

    def run() -> list[set[str]]:
        return PrefectConsole().run(Step("look"), look, None)

    with tags("mine"):
        assert PrivateFlow(run, name="end-to-end")() == [{TAG, "mine"}, {"mine"}]


def test_runs_of_our_deployments_have_our_tag():
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    assert [one["entrypoint"] for one in deployments if TAG not in one["tags"]] == []
