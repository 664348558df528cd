"""The feature log of a day, chunk by chunk."""

import datetime
from collections.abc import Iterator

import pyarrow as pa

from pipeline.extraction.generator.config import GeneratorConfig
from pipeline.extraction.generator.logs import make_chunk


def feature_batches(config: GeneratorConfig, day: datetime.date, window_seconds: int) -> Iterator[pa.RecordBatch]:
    for number in range(config.chunks_per_day):
        yield make_chunk(config, day, number, window_seconds).features
