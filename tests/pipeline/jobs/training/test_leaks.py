"""Features that tell the label by themselves, and the gate that holds their model."""

import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.config import load
from pipeline.data.alone import Alone
from pipeline.data.selection import Selection
from pipeline.evaluation.config import EvaluationConfig
from pipeline.evaluation.evaluate import Evaluation, ScoredRows
from pipeline.inference.files import PLAN
from pipeline.jobs.training.evaluate import Scored, decide
from pipeline.jobs.training.leaks import describe_leaks, find_leaks
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.dataset import DataSpec, fit_plan
from pipeline.transforms.plan.plan import build_plan
from tests.homes import open_smoke, rows_of, write_days

DAYS = [datetime.date(2025, 3, day) for day in (1, 2, 3)]
ROWS = 2_000


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("DLRM_HOME", str(tmp_path / "home"))
    return open_smoke()


def leaks_of(workspace: Workspace, folder: Path, names: dict[str, str] | None = None) -> dict[str, str]:
    """Feature -> what it tells, of rows in which two of four columns come after the label."""
    draw, tables = np.random.default_rng(8), []
    for day in DAYS:
        clicked = draw.random(ROWS) < 0.2
        tables.append(
            rows_of(
                day,
                ROWS,
                label=pa.array(clicked.astype(np.int64)),
                age=pa.array(draw.normal(size=ROWS) + 0.5 * clicked),
                dwell=pa.array(np.where(clicked, draw.gamma(2.0, 30.0, ROWS), 0.0)),
                user=pa.array(draw.integers(0, 300, ROWS)),
                page=pa.array([f"p{code}" for code in draw.integers(0, 200, ROWS) + 200 * clicked]),
            )
        )
    ref = write_days(workspace.warehouse, *tables)
    steps = [{"kind": "standardise"}, {"kind": "fill_null"}]
    features = {
        "dense": [{"columns": ["age", "dwell"], "transforms": steps}],
        "sparse": [{"columns": ["user", "page"], "transforms": [{"kind": "sigrid_hash", "size": 4_096}]}],
    }
    schema = load("configs/smoke.yaml", {"features": features}).features
    plan = build_plan(schema, workspace.warehouse.schema(ref))
    spec = DataSpec(
        snapshot=ref, plan=plan, label="label", warehouse=workspace.config.warehouse, home=str(workspace.warehouse.home),
        selection=Selection(days=tuple(DAYS)),
    )  # fmt: skip
    (folder / PLAN).write_text(fit_plan(spec, workspace.warehouse).model_dump_json())
    found = find_leaks(workspace.warehouse, spec, folder, names or {})
    return {name: alone.words for name, alone in found.items()} | {"": describe_leaks(found)}


def test_features_that_come_after_the_label_are_found(workspace: Workspace, tmp_path: Path) -> None:
    found = leaks_of(workspace, tmp_path)
    said = found.pop("")
    assert set(found) == {"dwell", "page"}
    assert said.startswith("'dwell': by itself it has an AUC of 1.0000; 'page': by itself it has an AUC of ")
    assert "" in leaks_of(workspace, tmp_path, {"dwell": "age"})
    assert set(leaks_of(workspace, tmp_path, {"dwell": "age"})) == {"page", ""}


def test_a_promotion_becomes_a_hold_unless_the_champion_is_as_good(workspace: Workspace) -> None:
    draw = np.random.default_rng(3)
    labels = (draw.random(5_000) < 0.3).astype(float)

    def judge(champion_noise: float, leaks: dict[str, Alone]) -> tuple[str, str]:
        logits = 4.0 * (labels - 0.5)
        ours = 1.0 / (1.0 + np.exp(-logits - 0.4 * draw.normal(size=5_000)))
        theirs = 1.0 / (1.0 + np.exp(-0.9 * logits - champion_noise * draw.normal(size=5_000)))
        evaluation = Evaluation(EvaluationConfig())
        evaluation.add(ScoredRows(labels, ours, pa.table({"day": np.zeros(5_000, np.int32)}), theirs))
        wide = {"gate.calibration_high": 9.0, "gate.calibration_low": 0.1}
        config = workspace.with_config(load("configs/smoke.yaml", wide))
        verdict = decide(config, Scored(evaluation, evaluation.report(), None, lambda: leaks), 4)
        return verdict.decision, verdict.reason

    leak = {"dwell": Alone(auc=0.9999)}
    assert judge(2.0, {})[0] == "promote"
    decision, reason = judge(2.0, leak)
    assert decision == "hold"
    assert reason == (
        "Features tell nearly all of the label: 'dwell': by itself it has an AUC of 0.9999. "
        "If all it reads is known before, promote it yourself: python -m flows.promote CONFIG version=N."
    )
    assert judge(0.5, leak)[0] == "promote", "a person promoted a champion that is as good"
