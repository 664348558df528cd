"""The log of what users watched: complete, in order, and what the planted model says of it."""

import datetime
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from pipeline.errors import ConfigError
from pipeline.extraction.generator import watched
from pipeline.extraction.generator.config import GeneratorConfig
from pipeline.extraction.generator.logs import write_logs
from pipeline.extraction.generator.planted import Ids

CONFIG = GeneratorConfig(
    days=3, rows_per_day=2_000, chunk_rows=700, users=150, watched_per_day=4.0, drift_strength=20.0
)
WEIGHT = 2.0  # pinned: another one changes what the demo learns
QUIET = CONFIG.model_copy(update={"watched_per_day": 0.0})


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    write_logs(CONFIG, folder / "with", 1_200)
    write_logs(QUIET, folder / "without", 1_200)
    return folder


def test_the_log_has_the_events_that_move_each_click(logs: Path) -> None:
    """An independent count: the log in SQL, row by row, beside the closed form of the generator."""
    found = (
        duckdb.sql(f"""
        WITH rows AS (SELECT impression_id, event_time, cat_user FROM read_parquet('{logs}/with/features/*.parquet')),
        ranked AS (
            SELECT impression_id, watched_category,
                row_number() OVER (PARTITION BY impression_id ORDER BY watched_at DESC) AS place
            FROM rows JOIN read_parquet('{logs}/with/watched/*.parquet') USING (cat_user)
            WHERE watched_at < event_time - INTERVAL 60 SECOND)
        SELECT impression_id, cat_user, epoch_us(event_time) AS at,
            list(watched_category ORDER BY place) FILTER (place <= 10) AS last
        FROM rows LEFT JOIN ranked USING (impression_id) GROUP BY ALL ORDER BY impression_id
        """)
        .arrow()
        .read_all()
    )
    last = np.array(found["last"].to_pylist())
    assert last.shape == (6_000, 10)
    effects = Ids(last.ravel(), shrink_of(last.ravel())).effect("watched_category").reshape(-1, 10).mean(axis=1)
    expected = watched.watched_effect(CONFIG, found["cat_user"].to_numpy(), found["at"].to_numpy())
    assert expected == pytest.approx(WEIGHT * effects, abs=1e-12)
    assert 0.3 < expected.std() < 0.8


def shrink_of(ids: np.ndarray) -> np.ndarray:
    """By a table of all categories: their popularity is their place."""
    every = watched.numbered(CONFIG, "categories", np.arange(CONFIG.categories))
    shrinks = dict(zip(every.ids.tolist(), every.shrink.tolist(), strict=True))
    return np.array([shrinks[one] for one in ids.tolist()])


def test_only_the_probability_of_a_click_differs(logs: Path) -> None:
    for path in sorted((logs / "with" / "features").iterdir()):
        one, other = (pq.read_table(logs / kind / "features" / path.name) for kind in ("with", "without"))
        assert one.drop_columns("true_probability").equals(other.drop_columns("true_probability"))
        assert not one["true_probability"].equals(other["true_probability"])
        share = watched_share()
        odds = [np.log(p / (1 - p)) for p in (table["true_probability"].to_numpy() / share for table in (one, other))]
        at = one["event_time"].cast("int64").to_numpy()
        effect = watched.watched_effect(CONFIG, one["cat_user"].to_numpy(), at)
        assert odds[0] - odds[1] == pytest.approx(effect, abs=1e-9)
    assert not (logs / "without" / "watched").exists()


def watched_share() -> float:
    return float((1 - CONFIG.lost_share) * (1 - np.exp(-1_200 / CONFIG.mean_delay_seconds)))


def test_days_are_in_order_and_users_differ_in_rate(logs: Path) -> None:
    days = watched.watched_days(CONFIG)
    assert days[-3:] == list(CONFIG.dates)
    for day in days:
        log = pq.read_table(logs / "with" / "watched" / f"day={day}.parquet")
        times = log["watched_at"].to_numpy()
        assert np.all(np.diff(times) >= np.timedelta64(0))
        assert {times[0].astype("M8[D]").item(), times[-1].astype("M8[D]").item()} == {day}
    counts = np.unique(log["cat_user"].to_numpy(), return_counts=True)[1]
    assert 3.5 < counts.mean() < 4.5
    assert counts.min() >= 1
    assert counts.max() <= 8


def test_a_longer_log_begins_with_the_days_of_a_shorter_one() -> None:
    longer = CONFIG.model_copy(update={"days": 9})
    assert watched.watched_days(longer)[: len(watched.watched_days(CONFIG))] == watched.watched_days(CONFIG)
    for day in watched.watched_days(CONFIG):
        same = zip(watched.watched_batches(CONFIG, day), watched.watched_batches(longer, day), strict=True)
        assert all(one.equals(other) for one, other in same)


def test_users_that_watch_less_than_daily_are_refused() -> None:
    with pytest.raises((ConfigError, ValidationError), match="0, or 1 or more"):
        GeneratorConfig(watched_per_day=0.2, start_day=datetime.date(2025, 1, 1))
