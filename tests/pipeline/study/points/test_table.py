"""A workload's rows in a table: a reader makes the same batches of them as the workload in memory."""

import numpy as np
import pytest

from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.client import Client, InlineSource
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.study.measure.group import measure_points
from pipeline.study.points import table as rows_of
from pipeline.study.points.config import Workload
from pipeline.study.points.load import load_study
from pipeline.study.points.points import StudyPoint
from pipeline.study.points.table import write_dataset
from pipeline.study.points.workload import draw_batches, make_plan

SHAPE = Workload(dense_features=3, sparse_features=4, hash_size=500, lookups=6, lengths="power_law", truncation=9)


def read(workload: Workload, rows: int, folder, monkeypatch) -> list:
    monkeypatch.setattr(rows_of, "CHUNK_VALUES", 8_000)  # several row groups and files
    spec = write_dataset(workload, rows, folder, seed=3)
    plan = make_plan(workload)
    assert (spec.plan.dense, spec.plan.sparse) == (plan.dense, plan.sparse)
    source = InlineSource({"train": spec}, PreprocessingConfig())
    return list(Client(source, ("train", spec), batch_rows=700).batches())


def test_the_reader_hashes_and_truncates_rows(tmp_path, monkeypatch):
    found = read(SHAPE, 2_000, tmp_path, monkeypatch)
    assert [batch.global_rows for batch in found] == [700, 700, 600]
    lengths = np.concatenate([batch.sparse.lengths().numpy() for batch in found])
    assert lengths.max() == SHAPE.truncation
    (drawn,) = draw_batches(SHAPE, 2_000, 1, seed=4)
    assert lengths.mean() == pytest.approx(drawn.sparse.lengths().numpy().mean(), rel=0.1)
    ids = np.concatenate([batch.sparse.values().numpy() for batch in found])
    assert (ids.min() >= 0, ids.max() < SHAPE.hash_size) == (True, True)
    numbers = np.concatenate([batch.dense.numpy() for batch in found])
    assert (numbers.mean(), numbers.std()) == pytest.approx((0.0, 1.0), abs=0.05)
    assert len(np.unique(numbers)) > 0.99 * numbers.size  # no two chunks are equal


def test_a_workload_without_numbers_can_be_read(tmp_path, monkeypatch):
    found = read(SHAPE.model_copy(update={"dense_features": 0}), 10, tmp_path, monkeypatch)
    assert [batch.dense.shape for batch in found] == [(10, 0)]


def test_an_existing_table_is_reused(tmp_path, monkeypatch):
    first = write_dataset(SHAPE, 50, tmp_path, seed=3)
    others = [write_dataset(SHAPE, 51, tmp_path, 3), write_dataset(SHAPE, 50, tmp_path, 4)]
    monkeypatch.setattr(rows_of, "replace_days", lambda *_: pytest.fail("written again"))
    assert write_dataset(SHAPE, 50, tmp_path, seed=3) == first
    assert len({spec.snapshot.table for spec in (first, *others)}) == 3


@pytest.mark.nightly
def test_a_study_of_a_workload_reads_files_through_the_service(tmp_path, monkeypatch):
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    settings = {
        "characterize": {"workload": SHAPE, "data": "files", "steps": 2, "repeats": 1, "warm_up_steps": 1},
        "training.world_size": 1, "training.threads_per_rank": 1, "training.batch_rows": 128, "preprocessing.workers": 1,
    }  # fmt: skip
    study = load_study("configs/smoke.yaml", settings)
    alone = [StudyPoint(values={}, settings={})]
    (result,) = measure_points(Workspace(study.run), study.characterize, alone, tmp_path / "study")
    assert result.reason is None
    assert result.measurement is not None
    assert result.measurement.load.rows == 128
    assert result.measurement.split_ms["wait"] > 0.0
