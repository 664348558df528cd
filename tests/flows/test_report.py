"""The report of a finished run, made from its record in MLflow."""

from pathlib import Path

from flows.report import report
from pipeline.jobs.training.summary import REPORT
from pipeline.registration.tracking import Tracker
from tests.homes import CONFIG, open_smoke


def test_the_champion_is_reported(smoke, command, home):
    code, result, log = command(report, CONFIG, home=home)
    assert (code, result["runs"]) == (0, [smoke["mlflow_run_id"]]), log
    text = Path(result["path"]).read_text(encoding="utf-8")
    assert f'<td class="number">{smoke["eval"]["ne"]:.4f}</td>' in text
    assert smoke["gate"]["reason"] in text
    client = open_smoke().tracking.client
    version = client.get_model_version("smoke", str(smoke["model"]["version"]))
    assert f"- evaluation: NE {smoke['eval']['ne']:.4f}, " in version.description


def test_two_runs_are_shown_side_by_side(smoke, command, home):
    code, result, log = command(report, CONFIG, "run=1", f"against={smoke['mlflow_run_id']}", home=home)
    assert code == 0, log
    assert '<th class="number">difference</th>' in Path(result["path"]).read_text(encoding="utf-8")


def test_a_run_of_an_older_version_is_refused(smoke, home, command, monkeypatch):
    known = Tracker.read_json

    def old(self, run_id, path):
        found = known(self, run_id, path)
        return {key: found[key] for key in found if key != "precision_recall"} if path == REPORT else found

    monkeypatch.setattr(Tracker, "read_json", old)
    code, result, _ = command(report, CONFIG, home=home)
    assert code == 1
    assert result["error"].endswith(
        "expected a report of this version of the code, got one without precision_recall. Train again."
    )


def test_an_unknown_version_is_refused(smoke, command, home):
    code, result, _ = command(report, CONFIG, "run=999", home=home)
    assert (code, result["error"]) == (
        1, "argument 'run': expected a version of model 'smoke', got 999. Name one.",
    )  # fmt: skip
    code, result, _ = command(report, CONFIG, "run=nonsense", home=home)
    assert result["error"].startswith("MLflow run 'nonsense': expected one with ")
