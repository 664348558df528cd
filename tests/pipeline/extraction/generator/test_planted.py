"""The planted model: pinned, shaped like real logs, drifting from day to day."""

import datetime

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pipeline.extraction.generator.config import GeneratorConfig
from pipeline.extraction.generator.logs import make_chunk
from tests.pipeline.extraction.generator.chunks import feature_batches

WINDOW_SECONDS = 1_200
CONFIG = GeneratorConfig(seed=3, rows_per_day=30_000, chunk_rows=20_000)
SESSION_COLUMNS = ["num_tenure_days", "num_click_share", "cat_user", "cat_country", "cat_device", "list_interests"]
GOLDEN_ITEMS = [1810299637779362723, 417792547451407400, 3642998457705340590]
GOLDEN_PROBABILITIES = [0.030469753368759216, 0.20305863338738914, 0.22268548055131746]


def log_of(day: datetime.date) -> pa.Table:
    return pa.Table.from_batches(feature_batches(CONFIG, day, WINDOW_SECONDS)).combine_chunks()


@pytest.fixture(scope="module")
def first_day() -> pa.Table:
    return log_of(CONFIG.start_day)


def top_ids(day: pa.Table, column: str, count: int) -> list[int]:
    counts = pc.value_counts(day[column].drop_null()).to_pylist()
    return [entry["values"] for entry in sorted(counts, key=lambda entry: -entry["counts"])[:count]]


def test_planted_model_is_pinned() -> None:
    features = make_chunk(GeneratorConfig(rows_per_day=3), datetime.date(2024, 1, 3), 0, WINDOW_SECONDS).features
    assert features["impression_id"].to_pylist() == [197250000000000, 197250000000001, 197250000000002]
    assert features["cat_item"].to_pylist() == GOLDEN_ITEMS
    assert features["true_probability"].to_pylist() == pytest.approx(GOLDEN_PROBABILITIES, rel=1e-9)


def test_feature_columns_and_null_shares(first_day: pa.Table) -> None:
    kinds = {str(field.type) for field in first_day.schema if field.name.startswith("list_")}
    assert kinds in ({"list<element: int64>"}, {"list<item: int64>"})
    assert [str(first_day.schema.field(name).type) for name in ("impression_id", "session_id")] == ["int64", "int64"]
    assert first_day.schema.field("event_time").type == pa.timestamp("us")
    by_prefix = {
        prefix: [n for n in first_day.column_names if n.startswith(prefix)] for prefix in ("num", "cat", "list")
    }
    assert [len(names) for names in by_prefix.values()] == [8, 7, 5]
    shares = {name: first_day[name].null_count / first_day.num_rows for name in first_day.column_names}
    expected = {"num_scroll_depth": 0.2, "num_item_age_hours": 0.1, "num_click_share": 0.05, "cat_advertiser": 0.1}
    assert {name: shares[name] for name in expected} == pytest.approx(expected, abs=0.012)
    assert shares["list_search_terms"] == pytest.approx(0.04, abs=0.01)
    assert shares["cat_user"] == shares["num_relevance"] == shares["true_probability"] == 0


def test_session_columns_are_constant_in_a_session(first_day: pa.Table) -> None:
    changing = ", ".join(f"count(DISTINCT coalesce({name}::TEXT, 'null')) > 1" for name in SESSION_COLUMNS)
    sizes = duckdb.sql(f"SELECT count(*) AS n, [{changing}] AS c FROM first_day GROUP BY session_id").fetchnumpy()
    assert not np.any(np.stack(sizes["c"]))
    assert sizes["n"].mean() == pytest.approx(CONFIG.session_mean_rows, rel=0.05)
    assert (sizes["n"] == 1).mean() == pytest.approx(1 / CONFIG.session_mean_rows, abs=0.03)  # geometric


def test_lists_of_a_session_repeat_only_if_asked_for(first_day: pa.Table) -> None:
    lists = [name for name in first_day.column_names if name.startswith("list_")]

    def changing(log: pa.Table) -> dict[str, bool]:
        counts = ", ".join(f"max(n_{name}) > 1 AS {name}" for name in lists)
        by_session = ", ".join(f"count(DISTINCT coalesce({name}::TEXT, 'null')) AS n_{name}" for name in lists)
        found = duckdb.sql(f"SELECT {counts} FROM (SELECT {by_session} FROM log GROUP BY session_id)").fetchnumpy()
        return {name: bool(found[name][0]) for name in lists}

    assert changing(first_day) == dict.fromkeys(lists, True) | {"list_interests": False}
    config = CONFIG.model_copy(update={"lists_per": "session", "session_mean_rows": 10.0})
    once = pa.Table.from_batches(feature_batches(config, CONFIG.start_day, WINDOW_SECONDS))
    assert not any(changing(once).values())
    assert once.num_rows / len(pc.unique(once["session_id"])) == pytest.approx(10, rel=0.1)


def test_list_lengths_follow_a_power_law_up_to_the_limit(first_day: pa.Table) -> None:
    lengths = pc.list_value_length(first_day["list_recent_items"]).drop_null().to_numpy()
    assert lengths.min() == 0
    assert lengths.max() == CONFIG.list_limit_ids
    geometric_tail = (1 - 1 / (1 + lengths.mean())) ** 25
    assert (lengths >= 25).mean() > 10 * geometric_tail
    nulls = first_day["list_interests"].combine_chunks().is_null()
    assert pc.any(nulls).as_py()


def test_ids_follow_zipf_and_fill_the_63_bit_range(first_day: pa.Table) -> None:
    ids = pc.list_flatten(first_day["list_recent_items"]).to_numpy()
    assert 0 <= ids.min() < 2**58
    assert ids.max() > 2**63 - 2**58
    counts = np.sort(np.unique(ids, return_counts=True)[1])[::-1]
    ranks = np.arange(4, 200)
    slope = np.polyfit(np.log(ranks), np.log(counts[ranks - 1]), 1)[0]
    assert -slope == pytest.approx(CONFIG.zipf_exponent, abs=0.15)


def test_popularity_and_means_drift(first_day: pa.Table) -> None:
    last_day = log_of(CONFIG.dates[-1])
    first, last = (top_ids(day, "cat_item", 100) for day in (first_day, last_day))
    assert first != last
    assert 50 <= len(set(first) & set(last)) < 100
    moved = abs(pc.mean(first_day["num_quality"]).as_py() - pc.mean(last_day["num_quality"]).as_py())
    assert 0.1 < moved < 1.0


def test_without_drift_ids_stay() -> None:
    still = CONFIG.model_copy(update={"drift_strength": 0.0})
    days = [make_chunk(still, still.dates[day], 0, WINDOW_SECONDS).features for day in (0, 6)]
    known = set(days[0]["cat_category"].to_pylist())
    assert top_ids(pa.table(days[0]), "cat_item", 5) == top_ids(pa.table(days[1]), "cat_item", 5)
    assert len(known & set(days[1]["cat_category"].to_pylist())) > 0.9 * len(known)
