"""What an ingest reports about broken rules: its result, the run's page, and files below home."""

import json

import numpy as np
import pandas as pd
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows.end_to_end import end_to_end
from flows.ingest import ingest
from tests.homes import write_config


@pytest.fixture
def config(tmp_path):
    """Five days. The last one lacks half of its rows."""
    draw = np.random.default_rng(3)
    sizes = [200, 200, 200, 200, 60]
    days = np.repeat([f"2025-01-0{day}" for day in range(1, 6)], sizes)
    rows = pd.DataFrame({"date": days, "user": draw.integers(0, 20, len(days)), "label": np.arange(len(days)) % 2})
    rows["bought"] = 1 - rows["label"]
    rows.to_parquet(tmp_path / "rows.parquet")
    values = {
        "name": "checked",
        "source": {"path": str(tmp_path / "rows.parquet"), "day_column": "date"},
        "features": {"sparse": [{"columns": "user", "transforms": [{"kind": "sigrid_hash", "size": 64}]}]},
        "split": {"hash": {"key": "user", "shares": {"train": 0.5, "test": 0.5}}},
    }
    return write_config(tmp_path, values)


def test_findings_are_in_the_result_on_the_page_and_in_files(prefect_command, config, tmp_path):
    home = tmp_path / "home"
    code, result, log = prefect_command(ingest, config, "ingest.checks.rows=quarantine", home=home)
    assert (code, result["status"], result["days_written"], result["days_held"], result["rows"]) == (0, "ok", 4, 1, 800)
    checks = result["checks"]
    assert (checks["ok"], checks["quarantine"]) == (4, 1)
    assert [(one["day"], one["rule"], one["got"]) for one in checks["findings"]] == [("2025-01-05", "rows", "60")]
    assert "quarantine: day 2025-01-05, rule rows: expected 100 to 300 as on the 4 days before it, got 60" in log
    assert (
        "1 days broke a rule and are held back in table checked_held, the first is 2025-01-05. "
        "Table checked keeps its versions of them"
    ) in log
    folder = home / "reports" / "ingest-checked-2025-01-01-2025-01-05"
    assert checks["report"] == str(folder)
    assert (folder / "checks.png").stat().st_size > 10_000
    saved = json.loads((folder / "checks.json").read_text())
    assert [day["outcome"] for day in saved["days"]] == ["ok"] * 4 + ["quarantine"]
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["checks-checked"])))
    assert json.loads(found[-1].data)[0]["rule"] == "rows"
    code, again, _ = prefect_command(ingest, config, "ingest.checks.rows=quarantine", home=home)
    assert (again["status"], again["days_held"], again["days_skipped"]) == ("skipped", 1, 4)


def test_a_table_of_two_configs_is_not_trained_on_unasked(command, config, tmp_path):
    home = tmp_path / "home"
    command(ingest, config, "name=mixed", home=home)
    rows = pd.read_parquet(tmp_path / "rows.parquet")
    rows[rows["date"] > "2025-01-01"].to_parquet(tmp_path / "rows.parquet")
    code, result, log = command(end_to_end, config, "name=mixed", "features.label=bought", home=home)
    assert (code, result["error"]) == (
        1,
        "table 'mixed': expected rows and labels of each day as the config says, got those of an earlier config in "
        "2025-01-01. Restore the input of these days and run again, write held days as they are now with "
        f"`python -m flows.ingest {config} day=DAY force=true`, or train on the table as it is with "
        "`python -m flows.train`.",
    )
    assert "1 days of table mixed have the rows and labels of an earlier config, the first is 2025-01-01" in log


def test_a_failing_day_ends_the_ingest_and_leaves_a_report(command, config, tmp_path):
    code, result, _ = command(ingest, config, "ingest.checks.rows=fail", home=tmp_path / "home")
    assert (code, result["status"]) == (1, "failed")
    assert result["error"] == (
        "day 2025-01-05, rule rows: expected 100 to 300 as on the 4 days before it, got 60. "
        "Correct the source, or set ingest.checks.rows to quarantine, warn or off."
    )
    assert (tmp_path / "home" / "reports" / "ingest-checked-2025-01-01-2025-01-05" / "checks.png").exists()
