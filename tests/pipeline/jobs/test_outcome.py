"""What lists of runs show of a result."""

from typing import Any

import pytest

from pipeline.jobs.outcome import describe_outcome, summarize

WAITS = {"pending": True, "decision": "hold", "reason": "It is judged on the next day, which no model has seen yet."}
LOWER = {"decision": "promote", "reason": "NE is lower."}
JUDGED = {"version": 6, "eval": {"ne": 0.95}, "gate": LOWER}
TRAINS, KEEPS = ({"training": kind, "reason": "of the policy"} for kind in ("further", "none"))
MODEL = {"name": "m", "version": 7}


def day(**values: Any) -> dict[str, Any]:
    return {"status": "ok", "day": "2025-03-02", "judged": None, "gate": None, "model": MODEL, **values}


@pytest.mark.parametrize(
    ("result", "short", "long"),
    [
        (
            day(judged=JUDGED, decision=TRAINS, gate=WAITS, eval={"ne": 0.9}),
            "2025-03-02 v6 promoted, NE 0.9500; v7 trained",
            "2025-03-02: version 6, promoted: NE is lower. Then version 7 is judged on the next day.",
        ),
        (
            day(judged=JUDGED, decision=KEEPS, model={"name": "m", "version": 6}),
            "2025-03-02 v6 promoted, NE 0.9500; no training",
            "2025-03-02: version 6, promoted: NE is lower. Then no training: of the policy.",
        ),
        (
            day(decision=TRAINS, gate=WAITS),
            "2025-03-02 v7 trained",
            "2025-03-02: version 7 is judged on the next day.",
        ),
        (day(decision=KEEPS), "2025-03-02 no training", "2025-03-02: no training: of the policy."),
        (
            day(decision=TRAINS, gate=LOWER, eval={"ne": 0.9}),
            "2025-03-02 v7 promoted, NE 0.9000",
            "2025-03-02: version 7, promoted: NE is lower.",
        ),
        (
            day(decision=TRAINS, gate={"decision": "hold", "reason": "By chance.", "champion": 6}, eval={"ne": 0.9}),
            "2025-03-02 v7 held, NE 0.9000",
            "2025-03-02: version 7, held: By chance.",
        ),
        (
            {"status": "ok", "days": 9, "days_written": 4, "rows": 8, "days_trained": 3, "days_judged": 1, "model": MODEL},
            "4 days written, 3 trained, 1 evaluated",
            "4 days written, 3 trained, 1 evaluated.",
        ),
        ({"status": "ok", "days_trained": 3, "days_judged": 0}, "3 days trained", "3 days trained."),
        (
            {"status": "ok", "version": 3, "days": ["a", "b"], "rows": 9_000, "table": "t", "mean_probability": 0.2},
            "v3 scored 2 days, 9,000 rows",
            "v3 scored 2 days, 9,000 rows, in table t.",
        ),
        (
            {"status": "ok", "trials": {"complete": 9, "pruned": 3}, "best": {"valid_ne": 0.81}, "config_path": "b.yaml"},
            "12 trials, best NE 0.8100",
            "12 trials; the best has NE 0.8100: b.yaml",
        ),
        ({"status": "ok", "removed": {}}, "", ""),
    ],
)  # fmt: skip
def test_lists_show_what_came_of_a_run(result, short, long):
    assert describe_outcome(result) == (short, long)


def test_a_terminal_shows_a_training_in_a_few_lines():
    result = {
        "status": "ok", "model": MODEL, "gate": LOWER, "mlflow_run_id": "f" * 32, "identity": "0" * 32,
        "train": {"rows": 600_000, "steps": 586, "rows_per_second": 21_345.6},
        "eval": {"ne": 0.74591, "auc": 0.82512, "rows": 120_000}, "baselines": [],
    }  # fmt: skip
    first, *others = summarize(result)
    assert first.startswith("ok: version 7, ")
    assert others == [
        "evaluated: NE 0.7459, AUC 0.8251, 120,000 rows",
        "trained: 600,000 rows, 586 steps, 21,346 rows/s",
        "--json prints all of it",
    ]
    assert summarize({"status": "skipped", "model": MODEL})[0] == "skipped: version 7 is there from the same work."
    assert summarize({"status": "ok", "path": "a.html", "rows": 9_000, "removed": {}}) == [
        "ok", "path: a.html, rows: 9,000", "--json prints all of it",
    ]  # fmt: skip
