"""The command says what it measured. Nothing is timed."""

import json
import math
import os

import pytest

from benchmarks import scoring
from benchmarks.machine import ROOT


@pytest.mark.slow
def test_the_command_measures_server_and_batches(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DLRM_HOME", os.environ.get("DLRM_HOME", ""))  # put back afterwards
    monkeypatch.setattr(scoring, "WARM_UP", 1)
    config = tmp_path / "tiny.yaml"
    config.write_text(
        f"base: {ROOT}/configs/smoke.yaml\ntraining: {{world_size: 1}}\npreprocessing: {{executor: inline}}\n"
    )
    words = ["--config", str(config), "--folder", str(tmp_path), "--batch-rows", "6000", "--rounds", "2"]
    scoring.main([*words, "--requests", "3", "--large-requests", "2", "--json"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {size: one["requests"] for size, one in figures["http"].items()} == {"1": 3, "1000": 2}
    for one in figures["http"].values():
        assert 0.0 < one["p50_ms"] <= one["p99_ms"]
        assert math.isclose(sum(one["shares"].values()), 1.0, abs_tol=0.003)
    assert figures["batch"]["rows"] == 6_000
    assert math.isclose(sum(figures["batch"]["shares"].values()), 1.0, abs_tol=0.003)
    assert figures["config"]["name"] == "smoke"
    assert {"mlflow", "torch", "python"} <= figures["machine"]["versions"].keys()
    assert "| 1,000 | " in scoring.as_text(figures)
