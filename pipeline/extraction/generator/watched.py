"""The log of what users watched, and how the last events of a user move the probability of a click.

Event k of a user is a function of the user and k. So the last events before any time are known without the log.
Array shapes in this file: E events, U users, R rows.
"""

import datetime
import math
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from pipeline.extraction.generator.config import GeneratorConfig
from pipeline.extraction.generator.planted import (
    DAY_US,
    EPOCH,
    Floats,
    Ids,
    Ints,
    drift_days,
    ids_of_places,
    mix,
    numbered,
    uniform,
    zipf_ranks,
)

LAST = 10
"""Events before an impression that move its log-odds."""
DELAY_US = 60_000_000
"""Events count if they are at least this much older than the impression."""
_WEIGHT = 2.0
_LOWEST_RATE = 0.5
"""Rate of the idlest user, as a share of the mean. The busiest has 1.5 times the mean."""
_SCHEMA = pa.schema([("cat_user", pa.int64()), ("watched_at", pa.timestamp("us")), ("watched_category", pa.int64())])


def watched_effect(config: GeneratorConfig, users: Ints, times_us: Ints) -> Floats:
    """Returns what the last events of each row's user add to the log-odds of a click, float64 [R].

    It is the mean of a planted weight of each event's category.

    Args:
        users: int64 [R].
        times_us: Of the impressions, microseconds since 1970, int64 [R].
    """
    gaps = _gaps(config, users)
    borders = times_us - DELAY_US
    newest = (borders // gaps).astype(np.int64) + 1
    for _ in range(3):  # at most two are too late; one more if the quotient was rounded up
        newest -= _times(users, newest, gaps) >= borders
    last = (newest[:, None] - np.arange(LAST)).ravel()
    effects = _categories(config, np.repeat(users, LAST), last).effect("watched_category")
    return config.signal_strength * _WEIGHT * effects.reshape(-1, LAST).mean(axis=1)


def watched_days(config: GeneratorConfig) -> list[datetime.date]:
    """Returns the days of the log. It begins so early that every user has LAST events before the first impression."""
    if not config.watched_per_day:
        return []
    before = range(_days_before(config), 0, -1)
    return [*(config.start_day - datetime.timedelta(days=back) for back in before), *config.dates]


def watched_batches(config: GeneratorConfig, day: datetime.date) -> Iterator[pa.RecordBatch]:
    """Yields the log of one day in the order of time, about `chunk_rows` events at once.

    A day has the events of all users who have impressions on that day, or will have soon enough for them to count.

    Example:
        >>> config = GeneratorConfig(users=100, watched_per_day=6)
        >>> len(watched_days(config)), sum(len(part) for part in watched_batches(config, config.start_day))
        (11, 612)
    """
    users = _users(config, day)
    gaps = _gaps(config, users)
    parts = math.ceil(len(users) * config.watched_per_day / config.chunk_rows)
    midnight = (day - EPOCH).days * DAY_US
    borders = (midnight + np.linspace(0, DAY_US, parts + 1)).astype(np.int64)
    for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        first = (begin // gaps).astype(np.int64) - 1
        counts = (end // gaps).astype(np.int64) + 2 - first
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        who = np.repeat(users, counts)
        times = _times(who, numbers, np.repeat(gaps, counts))
        inside = np.flatnonzero((times >= begin) & (times < end))
        inside = inside[np.argsort(times[inside], kind="stable")]
        categories = _categories(config, who[inside], numbers[inside]).ids
        arrays = [pa.array(who[inside]), pa.array(times[inside], pa.timestamp("us")), pa.array(categories)]
        yield pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def _days_before(config: GeneratorConfig) -> int:
    slowest = config.watched_per_day * _LOWEST_RATE
    return math.ceil((LAST + 1) / slowest + DELAY_US / DAY_US)


def _users(config: GeneratorConfig, day: datetime.date) -> Ints:
    """Returns the users whose events of a day may count for an impression, int64 [U]."""
    after = (day + datetime.timedelta(days=ahead) for ahead in range(_days_before(config) + 1))
    drifts = {drift_days(config, max(one, config.start_day)) for one in after}
    places = np.arange(config.users)
    return np.unique(np.concatenate([ids_of_places(config, "users", places, drift).ids for drift in drifts]))


def _gaps(config: GeneratorConfig, users: Ints) -> Floats:
    """Returns the mean microseconds between two events of each user, float64."""
    return DAY_US / (config.watched_per_day * (_LOWEST_RATE + uniform(users, "rate of watching")))


def _times(users: Ints, numbers: Ints, gaps: Floats) -> Ints:
    """Returns when the users' events of these numbers are, microseconds since 1970, int64."""
    return ((numbers + uniform(_events(users, numbers), "time of watching")) * gaps).astype(np.int64)


def _categories(config: GeneratorConfig, users: Ints, numbers: Ints) -> Ids:
    """Returns the category of each event. Popularity is that of the categories of impressions."""
    points = uniform(_events(users, numbers), "watched category")
    return numbered(config, "categories", zipf_ranks(points, config.categories, config.zipf_exponent))


def _events(users: Ints, numbers: Ints) -> Ints:
    """Returns one integer for each pair of user and number."""
    return users ^ mix(numbers, "number of an event").astype(np.int64)
