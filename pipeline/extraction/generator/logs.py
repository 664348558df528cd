"""Sample logs with a known answer: features and outcomes from a planted model, of any size, in bounded memory.

Every row has `true_probability`, so the best possible loss is known and a trained model can be compared with it.
Array shapes in this file: R rows and S sessions of a chunk.
"""

import datetime
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import ConfigError
from pipeline.extraction.generator.config import GeneratorConfig
from pipeline.extraction.generator.planted import DAY_US, EPOCH, Floats, Ints, counted_share, draw_columns
from pipeline.extraction.generator.watched import watched_batches, watched_days, watched_effect
from storage.artifacts import atomic_file

OUTCOME_SCHEMA = pa.schema(
    [("impression_id", pa.int64()), ("outcome_time", pa.timestamp("us")), ("action", pa.string())]
)
_NO_OUTCOMES = pa.RecordBatch.from_pylist([], schema=OUTCOME_SCHEMA)


class Chunk(NamedTuple):
    """A part of the feature log, and the outcomes of its impressions."""

    features: pa.RecordBatch
    outcomes: pa.RecordBatch
    """In order of outcome time, without lost ones. Some arrive on later days."""


def write_logs(
    config: GeneratorConfig, folder: Path, window_seconds: int, on_rows: Callable[[int], None] = lambda rows: None
) -> int:
    """Writes the logs as `features/day=YYYY-MM-DD.parquet` and `outcomes/day=YYYY-MM-DD.parquet`, zstd.

    With `watched_per_day` there is also `watched/day=YYYY-MM-DD.parquet`, which begins some days earlier. An outcome
    lies in the file of the day it arrives on. The outcome log has one day more than the feature log: its last file
    holds all that arrives after the last day. A file gets its name only when it is complete, and replaces an older one.
    Files of other days are not touched. `planted.draw_columns` describes the columns.

    Args:
        window_seconds: A click counts for the label up to this long after its impression.
        on_rows: Called with the number of impressions of every chunk written.
    Returns:
        Impressions written.
    Raises:
        ConfigError: If the window is not positive: no label could be 1.
    Example:
        >>> import tempfile
        >>> config = GeneratorConfig(days=2, rows_per_day=100)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_logs(config, Path(folder), window_seconds=3_600)
        ...     print([path.name for path in sorted(Path(folder, "outcomes").iterdir())])
        200
        ['day=2024-01-01.parquet', 'day=2024-01-02.parquet', 'day=2024-01-03.parquet']
    """
    if window_seconds <= 0:
        raise ConfigError(
            "window_seconds", "a positive number", str(window_seconds), "Raise it: without a window no label is 1."
        )
    last = config.dates[-1] + datetime.timedelta(days=1)
    with _OpenFiles(folder) as files:
        for day in watched_days(config):
            for events in watched_batches(config, day):
                files.write("watched", day, events)
            files.commit(day)
        for day in config.dates:
            for number in range(config.chunks_per_day):
                chunk = make_chunk(config, day, number, window_seconds)
                files.write("features", day, chunk.features)
                files.write("outcomes", day, _NO_OUTCOMES)
                for arrival, outcomes in _by_arrival_day(chunk.outcomes, last):
                    files.write("outcomes", arrival, outcomes)
                on_rows(chunk.features.num_rows)
            files.commit(day)
        files.write("outcomes", last, _NO_OUTCOMES)
        files.commit(last)
    return config.days * config.rows_per_day


def make_chunk(config: GeneratorConfig, day: datetime.date, number: int, window_seconds: int) -> Chunk:
    """Draws one chunk. It depends on these arguments alone.

    The joined label is 1 for a click that is not lost and arrives inside the window. Hence
    true_probability = sigmoid(logit) * (1 - lost_share) * (1 - exp(-window_seconds / mean_delay_seconds)).

    Args:
        number: Chunk of the day, from 0 to `config.chunks_per_day` - 1.
    Raises:
        ConfigError: If the day has no such chunk.
    Example:
        >>> config = GeneratorConfig(rows_per_day=1_000)
        >>> make_chunk(config, config.start_day, 0, 3_600).features.num_rows
        1000
    """
    if not 0 <= number < config.chunks_per_day:
        where, expected = f"chunk of {day}", f"0 to {config.chunks_per_day - 1}"
        raise ConfigError(where, expected, str(number), "Ask for a chunk that the day has.")
    first_row = number * config.chunk_rows
    rows = min(config.chunk_rows, config.rows_per_day - first_row)
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence((config.seed, day.toordinal(), number))))
    midnight_us = (day - EPOCH).days * DAY_US
    session_of_row, event_us = _draw_times(config, random, first_row, rows)
    impression_ids = (day - EPOCH).days * 10**10 + first_row + np.arange(rows)
    columns, logit = draw_columns(config, random, day, session_of_row, event_us)
    if config.watched_per_day:
        logit += watched_effect(config, columns["cat_user"].to_numpy(), midnight_us + event_us)
    click_probability = 1 / (1 + np.exp(-logit))
    features = pa.RecordBatch.from_pydict(
        {
            "impression_id": pa.array(impression_ids),
            "session_id": pa.array(impression_ids[0] + session_of_row),
            "event_time": pa.array(midnight_us + event_us, pa.timestamp("us")),
            **columns,
            "true_probability": pa.array(click_probability * counted_share(config, window_seconds)),
        }
    )
    return Chunk(features, _draw_outcomes(config, random, impression_ids, midnight_us + event_us, click_probability))


def _draw_times(config: GeneratorConfig, random: np.random.Generator, first_row: int, rows: int) -> tuple[Ints, Ints]:
    """Draws sessions of the rows, 0..S-1, and increasing event times in microseconds after midnight; both int64 [R]."""
    starts = random.random(rows) < 1 / config.session_mean_rows  # geometric lengths that fill the chunk exactly
    starts[0] = True
    session_of_row = np.cumsum(starts) - 1
    sessions = int(session_of_row[-1]) + 1
    share_of_day = (first_row + rows * np.sort(random.random(sessions))) / config.rows_per_day
    start_us = DAY_US * (share_of_day + 0.08 * np.sin(2 * np.pi * share_of_day))  # quiet nights, busy noons
    since_first_us = np.cumsum(random.exponential(30e6, rows))
    within_us = since_first_us - since_first_us[starts][session_of_row]
    event_us = np.minimum(start_us[session_of_row] + within_us, DAY_US - 1).astype(np.int64)
    order = np.argsort(event_us, kind="stable")
    return session_of_row[order], event_us[order]


def _draw_outcomes(
    config: GeneratorConfig, random: np.random.Generator, impression_ids: Ints, event_us: Ints, probability: Floats
) -> pa.RecordBatch:
    """Draws the logged clicks of a chunk in order of outcome time: some are lost, late or repeated."""
    rows = len(impression_ids)
    logged = (random.random(rows) < probability) & (random.random(rows) >= config.lost_share)
    delay_us = random.exponential(1e6 * config.mean_delay_seconds, rows)
    twice = logged & (random.random(rows) < config.duplicate_share)
    repeat_us = random.exponential(3e6, rows)
    times = np.concatenate([(event_us + delay_us)[logged], (event_us + delay_us + repeat_us)[twice]]).astype(np.int64)
    order = np.argsort(times, kind="stable")
    return pa.RecordBatch.from_arrays(
        [
            pa.array(np.concatenate([impression_ids[logged], impression_ids[twice]])[order]),
            pa.array(times[order], pa.timestamp("us")),
            pa.array(["click"] * len(order), pa.string()),
        ],
        schema=OUTCOME_SCHEMA,
    )


def _by_arrival_day(outcomes: pa.RecordBatch, last: datetime.date) -> Iterator[tuple[datetime.date, pa.RecordBatch]]:
    """Cuts outcomes, in order of time, at midnights. Those after the last day count as that day."""
    days = np.minimum(outcomes.column("outcome_time").cast(pa.int64()).to_numpy() // DAY_US, (last - EPOCH).days)
    borders = np.flatnonzero(np.diff(days, prepend=-(10**9), append=10**9))
    for begin, end in itertools.pairwise(borders.tolist()):
        yield EPOCH + datetime.timedelta(days=int(days[begin])), outcomes.slice(begin, end - begin)


class _OpenFiles:
    """Parquet files of a few days at a time. They get their final names when their day is complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[tuple[str, datetime.date], tuple[ExitStack, pq.ParquetWriter]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for closing, _ in self.files.values():
            closing.__exit__(kind, error, trace)

    def write(self, log: str, day: datetime.date, rows: pa.RecordBatch) -> None:
        if (log, day) not in self.files:
            closing = ExitStack()
            temporary = closing.enter_context(atomic_file(self.folder / log / f"day={day.isoformat()}.parquet"))
            writer = closing.enter_context(pq.ParquetWriter(temporary, rows.schema, compression="zstd"))
            self.files[log, day] = closing, writer
        if rows.num_rows:  # an empty batch only creates the file
            self.files[log, day][1].write_batch(rows)

    def commit(self, day: datetime.date) -> None:
        """Closes the files of this day and gives them their final names."""
        for key in [key for key in self.files if key[1] == day]:
            closing, _ = self.files.pop(key)
            closing.close()
