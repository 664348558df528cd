"""Row groups that cannot be read: only these are lost, and what is lost stays part of every position."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from pipeline.config import load
from pipeline.data.position import Position
from pipeline.errors import ConfigError, ContractError
from pipeline.jobs.training.rank.spec import SERVICE_FOLDER
from pipeline.jobs.training.train import summarize_preprocessing
from pipeline.preprocessing.client import Client, InlineSource
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.quarantine import read_quarantine
from pipeline.preprocessing.service import Service
from pipeline.study.estimate.footprint import measure_worker_speed
from pipeline.study.measure.rank import load_batches
from pipeline.training.config import TrainConfig
from tests.pipeline.preprocessing.reference import (
    CONFIG,
    ROOT,
    Reference,
    all_equal,
    client,
    corrupt,
    files_of,
    layout,
    numbers,
    source_of,
)

ROWS = 2481
SMOKE = ROOT / "configs" / "smoke.yaml"
QUARANTINE = CONFIG.model_copy(update={"on_corrupt": "quarantine"})


@pytest.fixture
def whole(days: list[pa.Table], make_warehouse: Callable[..., DataSpec], tmp_path: Path) -> DataSpec:
    """A warehouse of this test's own."""
    return make_warehouse(tmp_path / "warehouse", days)


def reading(spec: DataSpec, **config: object) -> Client:
    return client(InlineSource({"days": spec}, QUARANTINE.model_copy(update=config)), spec)


def damage(path: Path) -> Path:
    """Makes the first row group of a file unreadable. Returns a copy of the file as it was."""
    kept = path.with_suffix(".kept")
    shutil.copy(path, kept)
    corrupt(path)
    return kept


def test_only_the_row_group_that_cannot_be_read_is_lost(whole: DataSpec, days: list[pa.Table]) -> None:
    """However many row groups are read together."""
    file = files_of(whole)[4]
    corrupt(file)
    _, rows, (_, row_group) = layout(file)[0]
    for attempts in (1, 2, 3):
        reader = reading(whole, split_rows=1000, attempts=attempts)
        found = list(reader.batches())
        assert [(one.path, one.row_group, one.rows) for one in reader.lost] == [(f"file://{file}", row_group, rows)]
        assert all_equal(found, Reference(whole, days, [(file.name, row_group)]).batches())
        assert len(set(numbers(found))) == len(numbers(found)) == ROWS - rows


@pytest.mark.nightly
def test_a_resumed_epoch_goes_on_in_the_order_without_the_lost_rows(whole: DataSpec) -> None:
    """From every batch on, with other splits, and also if the file was restored in the meantime."""
    order = numbers(reading(whole).batches())
    begins = {order.index(layout(file)[0][0]): file for file in files_of(whole)}
    file = begins[min(begins, key=lambda place: abs(place - ROWS // 2))]  # one in the middle of the epoch
    kept = damage(file)
    reader = reading(whole)
    found = list(reader.batches())
    [lost] = reader.lost
    assert {len(batch.position.lost) for batch in found} == {0, 1}
    for restored in (False, True):
        if restored:
            shutil.copy(kept, file)
        for k, batch in enumerate(found):
            other = reading(whole, split_rows=1 + 400 * (k % 2))
            rest = list(other.batches(batch.position))
            if batch.position.lost or not restored:
                assert all_equal(rest, found[k + 1 :])
                assert other.lost == (lost,)
            else:  # the file is whole again before its turn
                assert len(numbers(found[: k + 1])) + len(numbers(rest)) == ROWS
                assert other.lost == ()


def test_what_was_lost_is_passed_on_to_the_next_epoch(whole: DataSpec, serve: Callable[..., Service]) -> None:
    file = files_of(whole)[4]
    corrupt(file)
    for source in (
        InlineSource({"days": whole}, QUARANTINE),
        source_of(serve(1, whole, on_corrupt="quarantine")),
    ):
        reader = client(source, whole)
        list(reader.batches())
        first = reader.lost
        list(reader.batches(Position(epoch=1, lost=first)))
        assert [(one.epoch, one.path) for one in reader.lost] == [(0, f"file://{file}"), (1, f"file://{file}")]
        assert reader.lost[:1] == first


@pytest.mark.slow
def test_a_file_that_breaks_among_rows_that_are_half_trained_ends_the_run(whole: DataSpec) -> None:
    """Which of its rows were trained cannot be told any more. Files of later windows are quarantined."""
    found = list(reading(whole).batches())
    refused, lost = list[str](), 0
    for k, batch in list(enumerate(found))[::5]:
        for file in files_of(whole):
            kept = damage(file)
            other = reading(whole)
            try:
                rest = list(other.batches(batch.position))
                lost += len(other.lost)
                done = numbers(found[: k + 1])
                assert len(done) + len(numbers(rest)) + sum(one.rows for one in other.lost) == ROWS
                assert not set(done) & set(numbers(rest))
            except ContractError as error:
                refused.append(str(error).replace(str(file), "FILE"))
            shutil.copy(kept, file)
    assert lost
    assert refused
    for sentence in refused:
        assert sentence.startswith("row group 0 of file 'file://FILE': expected to be readable, because the checkpoint")
        assert sentence.endswith("Restore the file, or delete the run's checkpoints to train from the start.")


def test_a_row_group_is_listed_once_however_often_it_is_met(whole: DataSpec, tmp_path: Path) -> None:
    """Ranks that start again meet it again, and so does each validation."""
    corrupt(files_of(whole)[4])
    for _ in range(2):
        with Service({"days": whole}, QUARANTINE.model_copy(update={"executor": "inline"}), tmp_path / "s") as service:
            for attempt in range(2):
                list(client(source_of(service), whole, attempt=attempt).batches())
            [entry] = service.totals.quarantined
            assert read_quarantine(tmp_path / "s") == [entry]
            assert service.totals.quarantined_rows == entry["rows"]
    assert json.loads((tmp_path / "s" / "quarantine.jsonl").read_text()) == entry


def test_ranks_that_read_for_themselves_may_not_lose_rows(whole: DataSpec) -> None:
    """Each would cut other batches."""
    source = InlineSource({"days": whole}, QUARANTINE)
    with pytest.raises(ConfigError) as caught:
        next(client(source, whole, rank=1, world_size=2).batches())
    assert str(caught.value) == (
        "preprocessing.on_corrupt 'quarantine': expected one rank if each rank reads for itself, got 2. "
        "Set training.world_size=1, or preprocessing.on_corrupt=fail."
    )


def test_a_config_of_inline_ranks_that_lose_rows_is_refused() -> None:
    words = {"preprocessing.executor": "inline", "preprocessing.on_corrupt": "quarantine"}
    assert load(SMOKE, words | {"training.world_size": 1})
    with pytest.raises(ConfigError, match="one executor for all ranks: each inline rank would lose other rows, got"):
        load(SMOKE, words | {"training.world_size": 2})


def test_the_result_counts_what_the_training_lacks_and_nothing_else(tmp_path: Path) -> None:
    """The list of the folder also has what an attempt lost after its last checkpoint."""
    day = {"path": "file:///a", "rows": 90, "day": "2025-01-01", "epoch": 0, "reason": "bad"}
    kept, later, valid = (
        day | {"row_group": number, "data": data} for number, data in ((1, "train"), (2, "train"), (3, "valid"))
    )
    (tmp_path / SERVICE_FOLDER).mkdir()
    lines = "".join(f"{json.dumps(entry)}\n" for entry in (kept, later, valid))
    (tmp_path / SERVICE_FOLDER / "quarantine.jsonl").write_text(lines)
    lost = [{"epoch": 0, "path": "file:///a", "row_group": 1, "rows": 90}]
    lost.append({"epoch": 1, "path": "file:///a", "row_group": 1, "rows": 90})
    summary = summarize_preprocessing(tmp_path, "inline", None, lost)
    assert summary == {"executor": "inline", "quarantined_rows": 270}
    listed = json.loads((tmp_path / "preprocessing.json").read_text())["quarantined"]
    assert listed == [kept, lost[1] | {"data": "train"}, valid]


def test_a_measurement_fails_where_rows_cannot_be_read(whole: DataSpec) -> None:
    """Nobody would hear of the lost rows: it has no list of them."""
    for file in files_of(whole):
        corrupt(file)
    training = TrainConfig(world_size=1, batch_rows=20)
    workspace: Any = SimpleNamespace(config=SimpleNamespace(preprocessing=QUARANTINE, training=training, seed=1))
    task: Any = SimpleNamespace(
        preprocessing=QUARANTINE, training=training, seed=1, study=SimpleNamespace(workload=None), data=whole
    )
    with pytest.raises(ContractError, match="expected a whole Parquet file"):
        load_batches(task, 0)
    with pytest.raises(ContractError, match="expected a whole Parquet file"):
        measure_worker_speed(workspace, whole)
