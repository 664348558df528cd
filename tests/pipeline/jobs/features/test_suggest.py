"""The file of a suggestion: which settings of the config it keeps."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.config import RunConfig, load
from pipeline.config.draft import load_draft
from pipeline.jobs.console import Console
from pipeline.jobs.features.suggest import DraftJob, Look, write
from pipeline.jobs.search.tune import search_space
from storage.reader import DAY
from tests.pipeline.suggestion.observing import look


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """A look at 2,000 rows of four days, on a machine without other work."""
    monkeypatch.setenv("DLRM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    draw = np.random.default_rng(3)
    days = pa.array((np.arange(2_000) // 500).astype(np.int32)).cast(pa.date32())
    rows = pa.table({DAY: days, "label": draw.integers(0, 2, 2_000), "cat_user": draw.integers(0, 90, 2_000)})
    observed, split = look(rows, tmp_path)
    return Look(observed, split, "files")


def suggested(seen: Look, config: str, overrides: dict[str, Any], **tuned: dict[str, Any]) -> RunConfig:
    draft = load_draft(config, overrides)
    return load(write(DraftJob(draft, Console(), overrides), seen, tuned).path)


@pytest.mark.parametrize("config", ["configs/flights.yaml", "configs/movielens100k.yaml", "configs/demo.yaml"])
def test_settings_of_a_tuned_config_give_way_to_the_suggested_ones(seen, config):
    """Both named `validate_every_steps`, which is the same span as the suggested `validate_every`."""
    found = suggested(seen, config, {})
    assert (found.training.validate_every, found.training.validate_every_steps) == (0.25, None)
    assert (found.training.table_optimizer, found.training.epochs, found.model.dropout) == ("adam", 100, 0.3)
    assert found.training.world_size == load(config).training.world_size
    assert found.evaluation.slices == load(config).evaluation.slices


def test_what_the_command_names_wins_and_removes_its_twin(seen):
    words = {"training.validate_every_steps": 9, "training.world_size": 1, "model.dropout": 0.0, "training.epochs": 1}
    found = suggested(seen, "configs/flights.yaml", words)
    assert (found.training.validate_every_steps, found.training.validate_every) == (9, None)
    assert (found.training.world_size, found.training.epochs, found.model.dropout) == (1, 1, 0.0)
    assert found.training.average_from == 0.5, "another span stays"


def test_keys_that_fit_the_machine_stay(seen, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(
        "source: {path: rows.csv, day: 2025-01-01}\n"
        "training: {world_size: 1, threads_per_rank: 1, keep_checkpoints: 5, table_learning_rate: 0.5}\n"
    )
    found = suggested(seen, str(path), {}).training
    assert (found.world_size, found.threads_per_rank, found.keep_checkpoints) == (1, 1, 5)
    assert found.table_learning_rate == 8e-3


@pytest.mark.parametrize(("load", "ranks"), [(0.0, 2), (15.5, 1)])
def test_ranks_are_as_many_as_processors_are_free(seen, tmp_path, monkeypatch, load, ranks):
    """Of sixteen processors. What a config says of ranks stays."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    path = tmp_path / "own.yaml"
    path.write_text("source: {path: rows.csv, day: 2025-01-01}\n")
    assert suggested(seen, str(path), {}).training.world_size == ranks
    assert suggested(seen, str(path), {"training.world_size": 4}).training.world_size == 4


def test_tuned_values_win(seen):
    found = suggested(seen, "configs/flights.yaml", {}, training={"table_learning_rate": 0.02}, model={"dropout": 0.1})
    assert (found.training.table_learning_rate, found.model.dropout) == (0.02, 0.1)
    assert "training.table_learning_rate" in search_space(found)
