"""The planted model: how columns are drawn, and how they determine the probability of a click.

Array shapes in this file: R rows and S sessions of a chunk.
"""

import datetime
import hashlib
import math
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.extraction.generator.config import GeneratorConfig

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

EPOCH = datetime.date(1970, 1, 1)
DAY_US = 86_400_000_000
"""Microseconds of a day."""


class _Dense(NamedTuple):
    """How a dense column is drawn, and how its standardised value moves the logit."""

    shape: Literal["normal", "count", "lognormal", "uniform", "share"]
    location: float
    scale: float
    weight: float
    nulls: float
    """Null share as a fraction of `most_nulls_share`."""
    null_effect: float = 0.0


_SESSION_DENSE = {
    "num_tenure_days": _Dense("count", 4.0, 1.2, 0.50, 0.0),
    "num_click_share": _Dense("share", -1.0, 0.8, 0.50, 0.25),
}
_ROW_DENSE = {
    "num_relevance": _Dense("normal", 0.3, 1.5, 0.65, 0.0),
    "num_quality": _Dense("normal", -2.0, 4.0, 0.40, 0.10),
    "num_price": _Dense("lognormal", 2.5, 0.9, -0.45, 0.15),
    "num_item_age_hours": _Dense("count", 3.0, 1.0, -0.40, 0.5),
    "num_position": _Dense("uniform", 0.0, 40.0, -0.55, 0.0),
    "num_scroll_depth": _Dense("uniform", 0.0, 1.0, 0.35, 1.0, null_effect=-0.15),
}
_DENSE = _SESSION_DENSE | _ROW_DENSE


class _Sparse(NamedTuple):
    """How an id column is drawn, and how much it moves the logit."""

    vocabulary: str
    """The field of GeneratorConfig with its size."""
    weight: float
    nulls: float = 0.0
    """Null share as a fraction of `most_nulls_share`."""


_SINGLE = {
    "cat_user": _Sparse("users", 0.20),
    "cat_item": _Sparse("items", 0.25),
    "cat_category": _Sparse("categories", 0.50),
    "cat_device": _Sparse("devices", 0.25),
    "cat_country": _Sparse("countries", 0.45),
    "cat_hour_slot": _Sparse("hours", 0.25),
    "cat_advertiser": _Sparse("advertisers", 0.35, nulls=0.5),
}
_LIST = {
    "list_interests": _Sparse("interests", 0.35, nulls=0.1),
    "list_recent_items": _Sparse("items", 0.35),
    "list_recent_categories": _Sparse("categories", 0.35),
    "list_recent_advertisers": _Sparse("advertisers", 0.35, nulls=0.05),
    "list_search_terms": _Sparse("search_terms", 0.30, nulls=0.2),
}
_INTERACTION_WEIGHT = 0.4
_LATENT_WIDTH = 4

_DRIFTING = {"users", "items", "interests", "search_terms"}
_ROTATION_PER_DAY = 0.02  # share of an octave of ranks
_TURNOVER_PER_DAY = 0.002  # share of the ids
_DENSE_SHIFT = 0.10  # standard deviations
_BASE_SHIFT = 0.05  # log-odds
_SHIFT_PERIOD_DAYS = 20.0


class Ids(NamedTuple):
    """Drawn ids, and the factor in (0, 1] by which rarity shrinks their planted weight."""

    ids: Ints
    shrink: Floats

    def take(self, index: Ints) -> "Ids":
        return Ids(self.ids[index], self.shrink[index])

    def effect(self, column: str) -> Floats:
        """Planted weight of every id: about normal, with at most the column's standard deviation."""
        return self.shrink * _normal(self.ids, column)


class _Column(NamedTuple):
    """A drawn column and what it adds to the logit, float64 of the same length."""

    values: pa.Array
    effect: Floats

    def take(self, index: Ints) -> "_Column":
        return _Column(self.values.take(pa.array(index)), self.effect[index])


def draw_columns(
    config: GeneratorConfig, random: np.random.Generator, day: datetime.date, session_of_row: Ints, event_us: Ints
) -> tuple[dict[str, pa.Array], Floats]:
    """Draws all feature columns, length R, and the log-odds of a click from them, float64 [R].

    Eight dense columns `num_*`, seven ids `cat_*` and five id lists `list_*`. Tenure, click share, user, country,
    device and interests are drawn per session, the other lists as `lists_per` says. An item determines its category and
    advertiser, a user the country.
    """
    draws = _Draws(config, random, drift_days(config, day))
    rows, sessions = len(session_of_row), int(session_of_row.max()) + 1
    users, items = draws.ids("users", sessions), draws.ids("items", rows)
    countries = draws.attribute("countries", users).take(session_of_row)
    categories = draws.attribute("categories", items)
    hours = numbered(config, "hours", event_us // 3_600_000_000)

    def lists(name: str) -> _Column:
        once = config.lists_per == "session"
        return draws.id_list(name, sessions).take(session_of_row) if once else draws.id_list(name, rows)

    columns = {
        **{name: draws.dense(name, sessions).take(session_of_row) for name in _SESSION_DENSE},
        **{name: draws.dense(name, rows) for name in _ROW_DENSE},
        "cat_user": draws.single("cat_user", users.take(session_of_row)),
        "cat_item": draws.single("cat_item", items),
        "cat_category": draws.single("cat_category", categories),
        "cat_device": draws.single("cat_device", draws.ids("devices", sessions).take(session_of_row)),
        "cat_country": draws.single("cat_country", countries),
        "cat_hour_slot": draws.single("cat_hour_slot", hours),
        "cat_advertiser": draws.single("cat_advertiser", draws.attribute("advertisers", items)),
        "list_interests": draws.id_list("list_interests", sessions).take(session_of_row),
        **{name: lists(name) for name in _LIST if name != "list_interests"},
    }
    effects = np.sum([column.effect for column in columns.values()], axis=0) + _interaction(categories, countries)
    logit = config.base_logit + _BASE_SHIFT * draws.shift("base rate") + config.signal_strength * effects
    return {name: column.values for name, column in columns.items()}, logit


def drift_days(config: GeneratorConfig, day: datetime.date) -> float:
    """Returns the days since the start of the log, times the drift strength."""
    return config.drift_strength * (day - config.start_day).days


def ids_of_places(config: GeneratorConfig, vocabulary: str, places: Ints, drift: float) -> Ids:
    """Returns the ids that these places of a drifting vocabulary have after so many days of drift."""
    age = uniform(places, f"turnover of {vocabulary}") + drift * _TURNOVER_PER_DAY
    return numbered(config, vocabulary, places, age.astype(np.int64))


def numbered(config: GeneratorConfig, vocabulary: str, places: Ints, generation: Ints | int = 0) -> Ids:
    """Returns the ids of these places in the vocabulary, spread over the 63-bit range."""
    ids = mix(places + (np.asarray(generation, np.int64) << 40), vocabulary) >> np.uint64(1)
    return Ids(ids.astype(np.int64), 1 / np.sqrt(1 + places / config.head_ids))


def counted_share(config: GeneratorConfig, window_seconds: int) -> float:
    """Returns the share of the clicks that are not lost and arrive inside the window."""
    return float((1 - config.lost_share) * -np.expm1(-window_seconds / config.mean_delay_seconds))


class _Draws(NamedTuple):
    """The random numbers of one chunk, turned into columns."""

    config: GeneratorConfig
    random: np.random.Generator
    drift_days: float
    """Days since the start of the log, times the drift strength."""

    def ids(self, vocabulary: str, count: int) -> Ids:
        """Draws ids by popularity, [count]."""
        return self.popular(vocabulary, self.random.random(count))

    def attribute(self, vocabulary: str, owners: Ids) -> Ids:
        """Returns the id of this vocabulary that each owner has, such as the country of a user."""
        return self.popular(vocabulary, uniform(owners.ids, vocabulary))

    def popular(self, vocabulary: str, points: Floats) -> Ids:
        """Returns the ids at these points of the day's popularity distribution."""
        size: int = getattr(self.config, vocabulary)
        if vocabulary not in _DRIFTING:
            return numbered(self.config, vocabulary, zipf_ranks(points, size, self.config.zipf_exponent))
        exponent = self.config.user_zipf_exponent if vocabulary == "users" else self.config.zipf_exponent
        places = _rotated(zipf_ranks(points, size, exponent), size, self.drift_days * _ROTATION_PER_DAY)
        return ids_of_places(self.config, vocabulary, places, self.drift_days)

    def nulls(self, fraction: float, count: int) -> Bools:
        """Draws which values are null, bool [count]."""
        return self.random.random(count) < fraction * self.config.most_nulls_share

    def shift(self, name: str) -> float:
        """Slow wave in [-1, 1] with a phase of this name's own: means move from day to day but stay bounded."""
        phase = uniform(np.zeros(1, np.int64), name)[0]
        return float(np.sin(2 * np.pi * (self.drift_days / _SHIFT_PERIOD_DAYS + phase)))

    def dense(self, name: str, count: int) -> _Column:
        """Draws a dense column, float64 [count]. Its effect is a function of the logged value alone."""
        spec = _DENSE[name]
        location = spec.location + (spec.scale * _DENSE_SHIFT * self.shift(name) if spec.shape != "uniform" else 0.0)
        values, standard = _dense_values(spec, location, self.random, count)
        nulls = self.nulls(spec.nulls, count)
        effect = np.where(nulls, spec.null_effect, spec.weight * standard)
        return _Column(pa.array(values, mask=nulls), effect)

    def single(self, name: str, drawn: Ids) -> _Column:
        """Makes an id column, int64, of ids already drawn. A null adds nothing to the logit."""
        nulls = self.nulls(_SINGLE[name].nulls, len(drawn.ids))
        effect = np.where(nulls, 0.0, _SINGLE[name].weight * drawn.effect(name))
        return _Column(pa.array(drawn.ids, mask=nulls), effect)

    def id_list(self, name: str, count: int) -> _Column:
        """Draws an id-list column, list<int64> [count]. Its effect is the mean over the list, or 0 if empty or null."""
        spec, config = _LIST[name], self.config
        lengths = zipf_ranks(self.random.random(count), config.list_limit_ids + 1, config.list_length_exponent)
        nulls = self.nulls(spec.nulls, count)
        lengths[nulls] = 0  # ids behind a null would slow down every reader
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        drawn = self.ids(spec.vocabulary, int(offsets[-1]))
        running = np.concatenate([[0.0], np.cumsum(drawn.effect(name))])
        effect = spec.weight * (running[offsets[1:]] - running[offsets[:-1]]) / np.maximum(lengths, 1)
        offsets_array = pa.array(offsets, pa.int32())
        return _Column(pa.ListArray.from_arrays(offsets_array, pa.array(drawn.ids), mask=pa.array(nulls)), effect)


def _dense_values(spec: _Dense, location: float, random: np.random.Generator, count: int) -> tuple[Floats, Floats]:
    """Draws values, and their roughly standardised form for the planted model; both float64 [count]."""
    if spec.shape == "uniform":
        share = random.random(count)
        return location + spec.scale * share, math.sqrt(12) * (share - 0.5)
    normal = location + spec.scale * random.standard_normal(count)
    if spec.shape == "normal":
        return normal, (normal - spec.location) / spec.scale
    if spec.shape == "share":
        share = 1 / (1 + np.exp(-normal))
        middle = 1 / (1 + np.exp(-spec.location))
        return share, (share - middle) / (spec.scale * middle * (1 - middle))
    values = np.floor(np.exp(normal)) if spec.shape == "count" else np.exp(normal)
    return values, (np.log1p(values) - spec.location) / spec.scale


def _interaction(left: Ids, right: Ids) -> Floats:
    """Dot product of the latent vectors of two ids, scaled to the planted weight; float64, as long as the ids."""
    total = np.zeros(len(left.ids))
    for k in range(_LATENT_WIDTH):
        total += left.effect(f"latent left {k}") * right.effect(f"latent right {k}")
    return total * (_INTERACTION_WEIGHT / math.sqrt(_LATENT_WIDTH))


def zipf_ranks(uniform: Floats, size: int, exponent: float) -> Ints:
    """Turns uniform draws into ranks 0..size-1 with a power-law distribution, int64.

    Inverts the distribution function of the density x ** -exponent on [1, size + 1]. It needs no table of any size.
    """
    top = float(size + 1)
    x: Floats = top**uniform if exponent == 1 else (1 + uniform * (top ** (1 - exponent) - 1)) ** (1 / (1 - exponent))
    return np.minimum(x.astype(np.int64), size) - 1


def _rotated(ranks: Ints, size: int, octaves: float) -> Ints:
    """Rotates ranks within their octave (1, 2-3, 4-7, ...): popularity changes by less than a factor of two."""
    places = ranks + 1
    octave = np.left_shift(1, np.frexp(places)[1].astype(np.int64) - 1)
    width = np.minimum(octave, size + 1 - octave)
    moved: Ints = places + (width * (octaves % 1)).astype(np.int64) - 1
    return moved - np.where(moved + 1 >= octave + width, width, 0)


def _salt(name: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


def mix(values: Ints, name: str) -> npt.NDArray[np.uint64]:
    """Spreads integers over 64 bits, independently for every name, by the finaliser of SplitMix64, a bijection.

    Source:
        Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators".
    """
    x = values.astype(np.uint64) ^ _salt(name)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def uniform(values: Ints, name: str) -> Floats:
    """Returns a fixed number in [0, 1) for every integer."""
    return (mix(values, name) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _normal(values: Ints, name: str) -> Floats:
    """Returns a fixed, nearly standard normal number per integer: the sum of the four 16-bit parts of its hash."""
    mixed = mix(values, name)
    total = np.zeros(len(values))
    for part in range(4):
        total += (mixed >> np.uint64(16 * part)) & np.uint64(0xFFFF)
    return (total - 2 * 65_535) / math.sqrt(4 * (65_536**2 - 1) / 12)
