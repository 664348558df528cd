"""What a day of recurring training keeps and clears."""

import datetime
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.data.config import PARTS, SplitConfig
from pipeline.data.selection import select
from pipeline.jobs.recurring.day import (
    clear_old_runs,
    exclude_test_rows,
    find_start,
    identity_of_day,
    require_champion,
)
from pipeline.jobs.recurring.run import load_series
from pipeline.jobs.training.checkpoints import list_checkpoints
from pipeline.jobs.training.rank.spec import checkpoint_identity
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.dataset import DataSpec
from pipeline.training.state.checkpoint import CheckpointError, write_whole
from tests.homes import open_smoke

SPLIT = {"hash": {"key": ["cat_user", "cat_item"], "shares": {"train": 0.8, "test": 0.2}, "days": ["2025-01-01"]}}
KEYS = {"name": "shared", "split": SPLIT, "recurring.keep_checkpoints": 1}
LAST = datetime.date(2025, 1, 9)
Make = Callable[..., Workspace]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Opens a workspace of a model that is trained on table `shared`."""
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    return lambda model, **more: open_smoke(KEYS | {"registration.model_name": model} | more)


def make_run(workspace: Workspace, day: int, alias: str | None = None) -> Path:
    """Makes the folder of a finished day and its version, which gets an alias."""
    model, client = workspace.config.model_name, workspace.tracking.client
    folder = workspace.home / "runs" / f"{workspace.config.model_key}-2025-01-{day:02}-{'a' * 12}-{model[0] * 8}-0"
    (folder / "checkpoints" / "step-0000000005").mkdir(parents=True)
    (folder / "weights.safetensors").touch()
    if not client.search_registered_models(f"name = '{model}'"):
        client.create_registered_model(model)
    tags = {"run_folder": folder.name, "trained_to": f"2025-01-{day:02}", "scratch_day": "2025-01-01"}
    version = client.create_model_version(model, str(folder), tags=tags).version
    (folder / "registered").write_text(f"{model} {version}\n")
    if alias is not None:
        client.set_registered_model_alias(model, alias, version)
    return folder


def test_clearing_spares_what_any_alias_of_any_model_names(make: Make) -> None:
    weekly, daily = make("weekly"), make("daily")
    served = [make_run(weekly, 1, "champion"), make_run(weekly, 2, "challenger"), make_run(weekly, 3, "reference")]
    old, back, champion = make_run(daily, 4), make_run(daily, 5), make_run(daily, 6, "champion")
    assert clear_old_runs(daily, LAST) == [old.name]
    kept = [*served, back, champion]
    assert all((folder / "checkpoints").exists() and (folder / "weights.safetensors").exists() for folder in kept)
    assert not (old / "checkpoints").exists()
    assert clear_old_runs(daily, LAST) == []


def test_clearing_leaves_an_unfinished_day_alone(make: Make) -> None:
    daily = make("daily")
    unfinished, _, _ = (make_run(daily, day) for day in (1, 2, 3))
    (unfinished / "registered").unlink()
    make_run(daily, 4, "champion")
    assert unfinished.name not in clear_old_runs(daily, LAST)
    assert (unfinished / "checkpoints").exists()


def test_clearing_leaves_the_days_of_another_model_alone(make: Make) -> None:
    weekly, daily = make("weekly"), make("daily")
    others = [make_run(weekly, day) for day in (1, 2, 3)]
    make_run(daily, 4, "champion")
    make_run(daily, 5)
    assert clear_old_runs(daily, LAST) == []
    assert all((folder / "checkpoints").exists() for folder in others)


def test_two_models_of_one_table_have_work_of_their_own(make: Make) -> None:
    assert identity_of_day(make("weekly"), LAST) != identity_of_day(make("daily"), LAST)
    assert identity_of_day(make("daily"), LAST) == identity_of_day(make("daily"), LAST)


def test_the_figure_of_a_model_has_no_days_of_another(make: Make) -> None:
    """They share the table, and so the experiment."""
    weekly, daily = make("weekly"), make("daily")
    for workspace, ne in ((weekly, 0.5), (daily, 0.9)):
        tags = {"dlrm.day": f"{LAST}"}
        run_id = workspace.tracking.start("a day", workspace.config.flat(), tags, None)
        values = {"ne": ne, "rows": 10.0, "label_rate": 0.5, "logloss": ne, "calibration": 1.0}
        workspace.tracking.log(run_id, 0, {f"champion_{name}": value for name, value in values.items()})
    for workspace, ne in ((weekly, 0.5), (daily, 0.9)):
        (day,) = load_series(workspace, "champion").days
        assert (day.day, day.loss) == (LAST, 10.0 * ne)


def test_checkpoints_of_daily_runs_are_listed(make: Make) -> None:
    daily = make("daily")
    names = [make_run(daily, day).name for day in (1, 2)]
    (daily.home / "runs" / "shared-notes").mkdir()
    found = list_checkpoints(daily, None, verify=False)["checkpoints"]
    assert [entry["run"] for entry in found] == names


def test_incremental_training_reads_all_but_the_test_rows() -> None:
    split = SplitConfig(hash={"key": "cat_user", "shares": {"train": 0.7, "valid": 0.1, "test": 0.2}})
    make: Any = DataSpec.model_construct  # of what is read here alone
    data = {part: make(selection=select(split, part, [LAST], None)) for part in PARTS}
    train, valid, test = (data[part].selection.hash_range for part in PARTS)
    assert exclude_test_rows(data).selection.hash_range == (train[0], valid[1]) == (0, test[0])


@pytest.mark.parametrize(
    ("key", "value", "got"),
    [
        ("model.embedding_width", 32, "8"),
        ("model.top_mlp", [8], r"\[16\]"),
        ("training.table_optimizer", "sgd", "rowwise_adagrad"),
    ],
)
def test_a_champion_of_another_shape_is_named_before_ranks_start(make: Make, key: str, value: Any, got: str) -> None:
    """Else each rank named a tensor of its optimizer, after minutes."""
    daily = make("daily")
    plan: Any = SimpleNamespace(hash="abc")
    champion = make_run(daily, 1, "champion")
    folder = champion / "checkpoints" / "step-0000000007"
    identity = checkpoint_identity(daily.config.model, daily.config.training, plan)
    write_whole(folder, {"model/w": torch.zeros(1)}, {"steps": 7, "finished": True}, identity)
    other = make("daily", **{key: value})
    with pytest.raises(CheckpointError, match=rf"{key}: expected .*, got {got}\. .*scratch=true"):
        find_start(other, require_champion(other), plan)
