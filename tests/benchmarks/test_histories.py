"""All ways give the same features. Nothing is timed here."""

from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks.histories import generate, read_all, tables
from tests.pipeline.preprocessing.reference import alone, equal


@pytest.mark.parametrize("order", ["time", "session"])
def test_cut_and_stored_lists_are_the_same_features(order: str, tmp_path: Path) -> None:
    samples, log = generate(rows=3_000, events=20_000, users=100, session_rows=7, order=order)
    specs = tables(tmp_path, samples, log, length=15, short=4)
    assert not specs["stored"].joined
    assert specs["cut"].joined
    found = {way: read_all(spec) for way, spec in specs.items()}
    digests = {way: one["digest"] for way, one in found.items()}
    assert digests["cut"] == digests["stored"]
    assert digests["cut, short"] == digests["stored, short"] != digests["cut"]
    assert found["stored, short"]["read_megabytes"] == found["stored"]["read_megabytes"], "whole lists are decoded"


def test_sessions_follow_one_another() -> None:
    samples, _ = generate(rows=2_000, events=1_000, users=5_000, session_rows=10, order="session")
    by_time, _ = generate(rows=2_000, events=1_000, users=5_000, session_rows=10)
    users = samples.column("user").to_numpy()
    assert (users[1:] == users[:-1]).mean() > 0.85
    assert (
        by_time.select(["at", "user"])
        .sort_by([("at", "ascending"), ("user", "ascending")])
        .equals(samples.select(["at", "user"]).sort_by([("at", "ascending"), ("user", "ascending")]))
    )
    assert samples.column("day").to_pylist() == sorted(samples.column("day").to_pylist())


def test_rows_of_a_request_share_the_list_that_is_cut(tmp_path: Path) -> None:
    """Five rows of one user and time: what is made of their list is made, sent and looked up once."""
    samples, log = generate(rows=1_000, events=20_000, users=100, session_rows=5, order="session")
    request = pa.array([row // 5 * 5 for row in range(samples.num_rows)])
    samples = samples.select(["num", "label"]).append_column("day", samples["day"].take(request))
    for name in ("at", "user"):
        samples = samples.append_column(name, generate(1_000, 20_000, 100, 5, "session")[0][name].take(request))
    cut = tables(tmp_path, samples, log, length=15)["cut"].model_copy(update={"session": "user"})
    plain = alone(cut).batches()
    shared = alone(cut.model_copy(update={"deduplicate": ("seen_item",)})).batches()
    rows = bags = 0
    for one, other in zip(plain, shared, strict=True):
        assert equal(one, other.plain)
        assert other.shared is not None
        rows, bags = rows + len(one.labels), bags + int(other.shared.inverse_B.max()) + 1
    assert rows == 1_000
    assert 150 < bags < 250
