"""The file of a suggestion: which settings of the config it keeps."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import RunConfig, load
from pipeline.config.draft import load_draft
from pipeline.data.formats import sample
from pipeline.jobs.console import Console
from pipeline.jobs.features import suggest as module
from pipeline.jobs.features.suggest import DraftJob, Look, write
from pipeline.jobs.search.tune import search_space
from pipeline.suggestion.choose import suggest
from storage.reader import DAY
from tests.homes import write_days
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


def events(tmp_path: Path, **columns: Any) -> tuple[pa.Table, Path]:
    """2,000 rows of 50 users and 80 films, with the time of each."""
    draw = np.random.default_rng(4)
    at = np.datetime64("2025-01-01T00:00:00", "us") + np.sort(draw.integers(0, 4 * 86_400, 2_000)).astype("m8[s]")
    made: dict[str, Any] = {"label": draw.integers(0, 2, 2_000), "user_id": draw.integers(0, 50, 2_000)}
    made |= {DAY: pa.array(at.astype("M8[D]")), "film": draw.integers(0, 80, 2_000), "seen_at": pa.array(at), **columns}
    return pa.table(made), tmp_path / "own.yaml"


def test_a_history_is_proposed_where_a_user_an_item_and_a_time_are_there(seen, tmp_path):
    """As a file of its own, which only adds the history to the suggestion. Both are the same model to the gate."""
    rows, path = events(tmp_path)
    path.write_text("name: own\nsource: {path: 'rows/*.parquet', day_column: seen_at}\n")

    def written(rows: pa.Table) -> Any:
        return write(DraftJob(load_draft(str(path)), Console(), {}), Look(*look(rows, tmp_path), "files"))

    found = written(rows)
    assert found.history == found.path.with_name("own_history.yaml")
    plain, listed = load(found.path), load(found.history)
    (history,) = listed.features.histories
    assert (history.table, history.on, history.time, history.as_of) == (
        "own_events",
        ("user_id",),
        "seen_at",
        "seen_at",
    )
    assert (history.last, history.delay_seconds, history.where) == (20, 3_600, "label = 1")
    assert listed.events["own_events"].path == plain.source.path
    assert listed.features.sparse[-1].columns == ("liked_film",)
    same = {"events": {}, "features": plain.features}
    assert listed.model_copy(update=same) == plain
    assert f"python -m flows.end_to_end {found.history};" in found.path.read_text()
    numbers = rows.set_column(4, "seen_at", pa.array(rows["seen_at"].to_numpy().astype("M8[s]").astype(np.int64)))
    assert written(numbers).history is None, "a history needs timestamps"
    assert "(features.histories): write 'seen_at' as a timestamp" in found.path.read_text()
    for name in ("user_id", "film", "seen_at"):
        assert written(rows.drop_columns(name)).history is None
    path.write_text(
        "name: own\nsource: {path: r.parquet, day_column: seen_at, lookups: [{path: u.parquet, on: user_id}]}\n"
    )
    assert written(rows).history is None, "the log may lack columns of side tables"


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


def many_days(folder: Path) -> pa.Table:
    """60,000 rows of 30 days: few users, ids whose number grows, lists, ids of one row each, a number and a time."""
    draw, rows = np.random.default_rng(5), 60_000
    at = np.datetime64("2025-01-01T00:00:00", "us") + np.sort(draw.integers(0, 30 * 86_400, rows)).astype("m8[s]")
    made = pa.table(
        {
            "label": draw.integers(0, 2, rows),
            "cat_user": draw.integers(0, 400, rows),
            "cat_item": draw.zipf(1.5, rows) % 1_000_000,
            "liked": [list(items) for items in draw.integers(0, 900, (rows, 2)).tolist()],
            "request": [f"r{n}" for n in range(rows)],
            "price": draw.gamma(2.0, 10.0, rows),
            "shown_at": pa.array(at),
        }
    )
    days = at.astype("M8[D]")
    for day in np.unique(days):
        pq.write_table(made.filter(pa.array(days == day)), folder / f"{day}.parquet", row_group_size=500)
    return made.append_column(DAY, pa.array(days))


@pytest.mark.parametrize("stored", [False, True])
def test_a_part_of_many_rows_gives_the_same_config(tmp_path, monkeypatch, stored):
    """Whether rows are read from files or from the table."""
    monkeypatch.setenv("DLRM_HOME", str(tmp_path / "home"))
    (tmp_path / "rows").mkdir()
    rows = many_days(tmp_path / "rows")
    (tmp_path / "own.yaml").write_text("name: own\nsource: {path: 'rows/*.parquet', day_column: shown_at}\n")
    job = DraftJob(load_draft(str(tmp_path / "own.yaml")), Console(), {})
    if stored:
        write_days(job.warehouse, rows, name="own", chunk_rows=500)
        monkeypatch.setattr(module, "has_own_table", lambda job: True)
    whole = module.look(job, not stored)
    for place in (module, sample):
        monkeypatch.setattr(place, "FEWEST_ROWS", 10)
    monkeypatch.setattr(module, "VALUES", 7 * 4_000)
    part = module.look(job, not stored)
    (note,) = part.notes
    assert re.fullmatch(r"looked at [34],\d+ rows, spread over about 60,\d+: counts are estimates", note)
    assert (whole.notes, whole.observed.scale) == ((), 1.0)
    assert part.observed.scale == pytest.approx(15.0, rel=0.15)
    assert part.observed.rows == pytest.approx(60_000, rel=0.01)
    found = {one.name: one.distinct for one in part.observed.facts}
    for fact in whole.observed.facts:
        assert fact.distinct / 2 < found[fact.name] < 2 * fact.distinct, fact.name
    one, other = (suggest(look.observed, "label", look.split, {}, ("shown_at", None)) for look in (whole, part))
    assert [(choice.fact.name, choice.use) for choice in other.choices] == [
        (choice.fact.name, choice.use) for choice in one.choices
    ]
    spans = [text for parts in part.split.config["days"].values() for text in parts]
    assert spans[0].startswith("2025-01-01..")
    assert spans[-1].endswith("2025-01-30")
    days = [date for text in spans for date in dict.fromkeys([text[:10], text[-10:]])]
    edges = np.array(days[1:-1], "M8[D]")
    assert len(set(edges[1::2] - edges[::2])) == 1, "each part begins on the day after the one before"
