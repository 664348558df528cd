"""Logs of the planted model: reproducible, in the right files, and calibrated to their stated probability."""

import datetime
import tracemalloc
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipeline.errors import ConfigError
from pipeline.extraction.generator.config import GeneratorConfig
from pipeline.extraction.generator.logs import make_chunk, write_logs
from tests.pipeline.extraction.generator.chunks import feature_batches

WINDOW_SECONDS = 1_200
CONFIG = GeneratorConfig(seed=3, rows_per_day=30_000, chunk_rows=20_000)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    assert write_logs(CONFIG, folder, WINDOW_SECONDS) == 7 * 30_000
    return folder


@pytest.fixture(scope="module")
def first_day(logs: Path) -> pa.Table:
    return read_day(logs, CONFIG.dates[0])


def read_day(logs: Path, day: datetime.date) -> pa.Table:
    return pq.ParquetFile(logs / "features" / f"day={day}.parquet").read()


def file_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def joined_labels(logs: Path) -> dict[str, np.ndarray]:
    """An independent join: label 1 if a click arrives inside the window."""
    return duckdb.sql(f"""
        SELECT f.event_time::DATE AS day, f.true_probability AS p, (o.impression_id IS NOT NULL)::INT AS y
        FROM read_parquet('{logs}/features/*.parquet') f
        LEFT JOIN (SELECT impression_id, min(outcome_time) AS first FROM read_parquet('{logs}/outcomes/*.parquet')
                   WHERE action = 'click' GROUP BY ALL) o
        ON f.impression_id = o.impression_id AND o.first < f.event_time + INTERVAL {WINDOW_SECONDS} SECOND
        """).fetchnumpy()


def test_same_config_same_bytes(tmp_path: Path) -> None:
    config = GeneratorConfig(days=2, rows_per_day=2_000, chunk_rows=1_500)
    write_logs(config, tmp_path / "a", WINDOW_SECONDS)
    write_logs(config, tmp_path / "b", WINDOW_SECONDS)
    assert file_bytes(tmp_path / "a") == file_bytes(tmp_path / "b")
    write_logs(config.model_copy(update={"seed": 1}), tmp_path / "c", WINDOW_SECONDS)
    assert file_bytes(tmp_path / "c") != file_bytes(tmp_path / "a")


def test_a_chunk_alone_is_the_chunk_of_the_log(first_day: pa.Table) -> None:
    alone = make_chunk(CONFIG, CONFIG.start_day, 1, WINDOW_SECONDS).features
    assert alone.num_rows == 10_000
    assert pa.Table.from_batches([alone]).equals(first_day.slice(20_000).combine_chunks())


def test_a_longer_log_begins_with_the_shorter_one(first_day: pa.Table) -> None:
    longer = CONFIG.model_copy(update={"days": 70})
    assert pa.Table.from_batches(feature_batches(longer, CONFIG.start_day, WINDOW_SECONDS)).equals(first_day)


def test_event_times_lie_in_their_day(logs: Path) -> None:
    for day in CONFIG.dates:
        table = read_day(logs, day)
        assert set(pc.unique(table["event_time"].cast(pa.date32())).to_pylist()) == {day}
        times = table["event_time"].cast(pa.int64()).to_numpy()
        assert (np.diff(times[:20_000]) >= 0).all()  # in order within a chunk


def test_impression_ids_are_unique(logs: Path) -> None:
    count, distinct = duckdb.sql(
        f"SELECT count(impression_id), count(DISTINCT impression_id) FROM '{logs}/features/*.parquet'"
    ).fetchall()[0]
    assert count == distinct == 7 * 30_000


def test_true_probability_is_calibrated(logs: Path) -> None:
    rows = joined_labels(logs)
    p, y = rows["p"], rows["y"]
    assert len(p) == 7 * 30_000
    assert 0.15 < y.mean() < 0.3
    for part in [p < 0.05, (p >= 0.05) & (p < 0.2), (p >= 0.2) & (p < 0.5), p >= 0.5, p >= 0]:
        standard_error = np.sqrt((p[part] * (1 - p[part])).sum()) / part.sum()
        assert abs(y[part].mean() - p[part].mean()) < 4 * standard_error


def test_floor_leaves_something_to_learn(logs: Path) -> None:
    rows = joined_labels(logs)
    last = rows["day"] == np.datetime64(CONFIG.dates[-1])
    p, y = rows["p"][last], rows["y"][last]
    base = y.mean()
    log_loss = -np.mean(y * np.log(p) + (1 - y) * np.log1p(-p))
    entropy = -(base * np.log(base) + (1 - base) * np.log1p(-base))
    assert 0.70 < log_loss / entropy < 0.85


def test_outcomes_are_late_lost_and_doubled(logs: Path) -> None:
    misfiled, late, repeated, actions = duckdb.sql(f"""
        SELECT count(*) FILTER (o.outcome_time::DATE <> regexp_extract(o.filename, 'day=([-0-9]+)', 1)::DATE),
               avg((o.outcome_time >= f.event_time + INTERVAL {WINDOW_SECONDS} SECOND)::INT),
               1 - count(DISTINCT o.impression_id) / count(*), list(DISTINCT action)
        FROM read_parquet('{logs}/outcomes/*.parquet', filename=true) o JOIN '{logs}/features/*.parquet' f
        USING (impression_id)
        """).fetchall()[0]
    assert misfiled == 0
    assert late == pytest.approx(np.exp(-2), abs=0.01)
    assert repeated == pytest.approx(CONFIG.duplicate_share, abs=0.003)
    assert actions == ["click"]
    names = sorted(path.name for path in (logs / "outcomes").iterdir())
    assert names == [f"day=2024-01-0{day}.parquet" for day in range(1, 9)]


def test_slow_outcomes_end_in_one_file_after_the_last_day(tmp_path: Path) -> None:
    config = GeneratorConfig(days=2, rows_per_day=2_000, mean_delay_seconds=5 * 86_400, lost_share=0, duplicate_share=0)
    write_logs(config, tmp_path, WINDOW_SECONDS)
    assert len(list((tmp_path / "outcomes").iterdir())) == 3
    clicks = sum(make_chunk(config, day, 0, WINDOW_SECONDS).outcomes.num_rows for day in config.dates)
    assert duckdb.sql(f"SELECT count(*) FROM '{tmp_path}/outcomes/*.parquet'").fetchall() == [(clicks,)]


def test_memory_does_not_grow_with_the_day() -> None:
    def peak_bytes(rows: int) -> int:
        config = GeneratorConfig(rows_per_day=rows, chunk_rows=2_000)
        arrow_before = pa.total_allocated_bytes()
        tracemalloc.start()
        arrow_peak = 0
        for _ in feature_batches(config, config.start_day, WINDOW_SECONDS):
            arrow_peak = max(arrow_peak, pa.total_allocated_bytes() - arrow_before)
        peak = tracemalloc.get_traced_memory()[1] + arrow_peak
        tracemalloc.stop()
        return peak

    peak_bytes(4_000)  # warm up caches
    assert peak_bytes(40_000) < 1.5 * peak_bytes(4_000)


def test_a_day_of_any_size_starts_at_once() -> None:
    config = GeneratorConfig(rows_per_day=5_000_000_000, chunk_rows=1_000)
    assert next(feature_batches(config, config.start_day, WINDOW_SECONDS)).num_rows == 1_000
    assert make_chunk(config, config.start_day, config.chunks_per_day - 1, WINDOW_SECONDS).features.num_rows == 1_000


def test_a_failed_write_leaves_the_old_files(tmp_path: Path) -> None:
    config = GeneratorConfig(days=2, rows_per_day=500)
    seen: list[int] = []
    write_logs(config, tmp_path, WINDOW_SECONDS, seen.append)
    assert seen == [500, 500]
    before = file_bytes(tmp_path)

    def stop(rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_logs(config.model_copy(update={"seed": 9}), tmp_path, WINDOW_SECONDS, stop)
    assert file_bytes(tmp_path) == before
    write_logs(config, tmp_path, WINDOW_SECONDS)
    assert file_bytes(tmp_path) == before  # same names, same content, no temporary file


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as window:
        write_logs(CONFIG, tmp_path, 0)
    assert (
        str(window.value)
        == "window_seconds: expected a positive number, got 0. Raise it: without a window no label is 1."
    )
    with pytest.raises(ConfigError) as chunk:
        make_chunk(CONFIG, CONFIG.start_day, 2, WINDOW_SECONDS)
    assert str(chunk.value) == "chunk of 2024-01-01: expected 0 to 1, got 2. Ask for a chunk that the day has."
