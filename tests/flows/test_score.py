"""The champion scores warehouse days: each day once, with the model's own probabilities."""

import contextlib
import io
import re

import numpy as np
import pyarrow as pa
import pytest

from flows.ingest import ingest
from flows.score import score
from pipeline.config.files import ROOT
from pipeline.inference.model import LoadedModel
from pipeline.registration.aliases import CHAMPION, list_versions, move_alias
from tests.homes import CONFIG, open_smoke, read_rows

KEEP = ("label", "cat_user", "list_interests", "event_time")
DAYS = ["2025-01-06", "2025-01-07", "2025-01-08", "2025-01-09"]


def everything(table: str, columns: list[str]) -> pa.Table:
    return read_rows(open_smoke().warehouse, table, columns)


def another_champion() -> int:
    """The smoke run's model as a second version."""
    tracker = open_smoke().tracking
    first = tracker.client.get_model_version("smoke", "1")
    made = tracker.client.create_model_version("smoke", first.source, first.run_id, tags=first.tags)
    move_alias(tracker, "smoke", CHAMPION, int(made.version), "person", "the same again")
    return int(made.version)


@pytest.mark.slow
def test_days_are_scored_once_for_each_champion_and_content(smoke, home, copied, command):
    keep = f"scoring.keep=[{', '.join(KEEP)}]"
    code, result, log = command(score, CONFIG, keep, "start=2025-01-08", home=copied)
    assert code == 0, log
    assert (result["status"], result["model"], result["version"], result["days"]) == ("ok", "smoke", 1, DAYS[2:])
    code, result, log = command(score, CONFIG, keep, home=copied)
    assert code == 0, log
    assert (result["status"], result["days"], result["skipped_days"], result["rows"]) == (
        "ok", DAYS[:2], DAYS[2:], 10_000,
    )  # fmt: skip
    assert "skipped: 2 days have scores of version 1 and the same rows; force=true scores them again" in log
    assert result["table"] == "smoke_scores"
    assert result["rows_per_second"] > 0

    model = LoadedModel(home / "runs" / f"smoke-{smoke['identity'][:12]}-0" / "model")
    rows = everything("smoke", list(dict.fromkeys(["day", *KEEP, *model.columns])))
    assert any(column.null_count for column in rows.columns)
    assert any(len(items or []) != 1 for items in rows["list_interests"].to_pylist())
    scores = everything("smoke_scores", ["day", *KEEP, "probability", "model_version"])
    for name in ("day", *KEEP):
        assert scores[name].to_pylist() == rows[name].to_pylist(), name
    expected = model.score(rows)
    assert np.abs(scores["probability"].to_numpy() - expected).max() < 1e-6
    assert set(scores["model_version"].to_pylist()) == {1}
    assert result["mean_probability"] == pytest.approx(expected[:10_000].mean(), abs=1e-9)
    assert not list((copied / "tmp").iterdir())
    assert "10,000 scores are in table smoke_scores of the warehouse" in log
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(encoding="utf-8"), re.DOTALL)
    [code] = [block for block in blocks if "demo_scores" in block]
    code = code.replace(".dlrm/", f"{copied}/").replace("dlrm.demo_", "dlrm.smoke_")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert "2025-01-0" in printed.getvalue()

    code, again, log = command(score, CONFIG, keep, home=copied)
    assert (code, again["status"], again["days"], again["rows"]) == (0, "skipped", [], 0), log
    assert again["snapshot_id"] == result["snapshot_id"]
    code, _, log = command(ingest, CONFIG, "day=2025-01-07", "force=true", home=copied)
    assert code == 0, log
    code, result, log = command(score, CONFIG, keep, home=copied)
    assert (code, result["days"], result["rows"]) == (0, DAYS[1:2], 5_000), log
    number = another_champion()
    code, result, log = command(score, CONFIG, keep, home=copied)
    assert (code, result["version"], result["days"]) == (0, number, []), log
    assert "skipped: 4 days keep the scores of an earlier version; start=DAY scores from there" in log
    code, result, log = command(score, CONFIG, keep, "start=2025-01-06", home=copied)
    assert (code, result["version"], result["days"]) == (0, number, DAYS), log
    assert set(everything("smoke_scores", ["model_version"])["model_version"].to_pylist()) == {number}
    code, result, log = command(score, CONFIG, keep, "version=1", "end=2025-01-06", home=copied)
    assert (code, result["version"], result["days"], result["skipped_days"]) == (0, 1, DAYS[:1], []), log


@pytest.mark.slow
def test_models_and_named_versions_keep_their_scores_apart(smoke, home, copied, command):
    second = "registration.model_name=Small model"
    tracker = open_smoke().tracking
    first = tracker.client.get_model_version("smoke", "1")
    tracker.client.create_registered_model("Small model")
    tracker.client.create_model_version("Small model", first.source, first.run_id, tags=first.tags)
    move_alias(tracker, "Small model", CHAMPION, 1, "person", "the same")
    runs = [("scoring.keep=[cat_user]",), (second,), ("version=1",), (second, "version=1")]
    results = [command(score, CONFIG, *words, "end=2025-01-06", home=copied) for words in runs]
    assert [(code, one["status"], one["rows"]) for code, one, _ in results] == [(0, "ok", 5_000)] * 4, results[-1][2]
    tables = [one["table"] for _, one, _ in results]
    assert (tables[0], len({*tables})) == ("smoke_scores", 4)
    again = [command(score, CONFIG, *words, "end=2025-01-06", home=copied)[1]["status"] for words in runs]
    assert again == ["skipped"] * 4
    assert everything("smoke_scores", ["cat_user"]).num_rows == 5_000


def test_a_day_that_cannot_be_scored_is_one_sentence(copied, command):
    code, result, _ = command(score, CONFIG, "version=99", home=copied)
    known = ", ".join(str(number) for number in list_versions(open_smoke().tracking, "smoke"))
    assert (code, result["error"]) == (
        1, f"model 'smoke': expected a version among {known}, got 99. Name one of them: version=N.",
    )  # fmt: skip
    open_smoke().tracking.client.delete_registered_model_alias("smoke", "champion")
    code, result, _ = command(score, CONFIG, home=copied)
    assert (code, result["error"]) == (
        1, f"model 'smoke': expected a champion, got none. Choose among versions {known}: python -m flows.promote "
        f"{CONFIG} version=N. Or score with one of them: version=N.",
    )  # fmt: skip
    code, result, _ = command(score, CONFIG, "start=soon", home=copied)
    assert code == 1
    assert result["error"].startswith("argument 'start': expected ")
