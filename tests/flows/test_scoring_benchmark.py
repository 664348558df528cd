"""The scoring benchmark runs on the smoke run's model and prints its result. Nothing is timed."""

import json
import math

import pytest

from benchmarks import scoring


@pytest.mark.nightly
def test_the_command_measures_server_and_batches(smoke, home, capsys, monkeypatch):
    monkeypatch.setenv("DLRM_HOME", str(home))
    monkeypatch.setattr(scoring, "WARM_UP", 1)
    words = ["--config", "configs/smoke.yaml", "--folder", str(home), "--batch-rows", "6000", "--rounds", "2"]
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
