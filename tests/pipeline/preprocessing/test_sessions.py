"""Sessions stay together, and their rows share lists: batches equal the plain ones but have fewer ids."""

import hashlib
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.errors import ConfigError, DataError
from pipeline.preprocessing.client import BatchSource, Client, InlineSource
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.drain import drain
from pipeline.preprocessing.epoch import kernels
from pipeline.preprocessing.epoch.memory import PrivateWriter
from pipeline.preprocessing.epoch.splits import Split, permute_rows, permute_sessions
from pipeline.preprocessing.service import Service
from pipeline.preprocessing.worker import Worker
from tests.pipeline.preprocessing.reference import (
    CONFIG,
    WINDOW_ROWS,
    Reference,
    all_equal,
    client,
    draws,
    expected_numbers,
    in_sessions,
    joined,
    numbers,
    source_of,
)

GROUP = ("list_items",)
GOLDEN = [6, 0, 1, 2, 7, 8, 3, 4, 5]
QUICK = settings(derandomize=True, max_examples=100, deadline=None, database=None)
Maker = Callable[[Path, list[pa.Table]], DataSpec]


@pytest.fixture(scope="module")
def tables(days: list[pa.Table]) -> list[pa.Table]:
    return [in_sessions(day, seed) for seed, day in enumerate(days)]


@pytest.fixture(scope="module")
def plain(tables: list[pa.Table], make_warehouse: Maker, tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    """Sessions stay together, but each row has its own lists."""
    made = make_warehouse(tmp_path_factory.mktemp("sessions"), tables)
    return made.model_copy(update={"session": "session"})


@pytest.fixture(scope="module")
def once(plain: DataSpec) -> DataSpec:
    return plain.model_copy(update={"deduplicate": GROUP})


@pytest.fixture(scope="module", params=["inline", pytest.param("process", marks=pytest.mark.nightly)])
def source(
    plain: DataSpec, once: DataSpec, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[BatchSource]:
    data = {"plain": plain, "once": once}
    if request.param == "inline":
        yield InlineSource(data, CONFIG)
        return
    config = CONFIG.model_copy(update={"executor": "process", "workers": 2})
    with Service(data, config, tmp_path_factory.mktemp("service")) as service:
        yield source_of(service)


class BySession(Reference):
    """A reference that permutes the sessions of each window."""

    def __init__(self, spec: DataSpec, days: list[pa.Table]) -> None:
        super().__init__(spec, days)
        self.sessions = pa.concat_tables(days)["session"].to_pylist()

    def windows(self, seed: int, epoch: int, window_rows: int | None, split_rows: int) -> list[list[int]]:
        if window_rows is None:
            return super().windows(seed, epoch, window_rows, split_rows)
        stored: list[list[int]] = []
        held = window_rows
        for group in draws(seed, epoch, 0).permutation(len(self.groups)):
            rows, chosen = self.groups[group]
            if held >= window_rows:
                stored.append([])
                held = 0
            stored[-1] += chosen
            held += rows
        made = []
        for number, window in enumerate(stored):
            runs = [list(run) for _, run in groupby(window, key=lambda row: self.sessions[row] or -row)]
            made.append([row for i in draws(seed, epoch, number + 1).permutation(len(runs)) for row in runs[i]])
        return made


# -- order ------------------------------------------------------------------------------------------------------------


def test_golden_order_of_sessions() -> None:
    order = permute_sessions(7, 2, 5, np.repeat([4, 4, 9, 4, 1], [2, 1, 3, 1, 2]))
    assert order.tolist() == GOLDEN
    assert permute_sessions(7, 2, 5, np.arange(9)).tolist() == permute_rows(7, 2, 5, 9).tolist()
    assert permute_sessions(7, 2, 5, np.zeros(0, np.int64)).tolist() == []


@QUICK
@given(sessions=st.lists(st.integers(-2, 2), max_size=30), window=st.integers(0, 5))
def test_sessions_move_as_a_whole(sessions: list[int], window: int) -> None:
    order = permute_sessions(3, 1, window, np.array(sessions, np.int64)).tolist()
    runs = [[row for row, _ in run] for _, run in groupby(enumerate(sessions), key=lambda pair: pair[1])]
    assert order == [row for i in draws(3, 1, window + 1).permutation(len(runs)) for row in runs[i]]


@pytest.mark.parametrize("window_rows", [WINDOW_ROWS, None])
def test_batches_are_those_of_the_reference(
    source: BatchSource, plain: DataSpec, tables: list[pa.Table], window_rows: int | None
) -> None:
    found = list(client(source, plain, "plain", window_rows=window_rows).batches(Position(epoch=1)))
    assert all_equal(found, BySession(plain, tables).batches(epoch=1, window_rows=window_rows))
    assert sorted(numbers(found)) == expected_numbers(plain, tables)


def test_a_row_without_a_session_is_alone(once: DataSpec) -> None:
    column = pa.chunked_array([pa.array(["a", None, None], pa.string()), pa.array(["a"], pa.string())])
    sessions = Worker(once).sessions(pa.table({"session": column}))
    assert sessions is not None
    assert sessions[0] == sessions[3]
    assert len(set(sessions.tolist())) == 3


def test_sessions_of_another_kind_are_refused(once: DataSpec) -> None:
    with pytest.raises(DataError, match=r"column 'session': expected ids: whole numbers, got 0.5"):
        Worker(once).sessions(pa.table({"session": [0.5]}))


# -- lists in common --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [("list_items",), ("cat_user",), ("cat_user", "list_items")])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_expanded_batches_are_the_plain_ones_bit_for_bit(
    plain: DataSpec, tables: list[pa.Table], world_size: int, group: tuple[str, ...]
) -> None:
    spec = plain.model_copy(update={"deduplicate": group})
    readers = [
        client(InlineSource({"days": spec}, CONFIG), spec, rank=r, world_size=world_size) for r in range(world_size)
    ]
    shares = [list(reader.batches()) for reader in readers]
    found = [joined([share.plain for share in ranks]) for ranks in zip(*shares, strict=True)]
    assert all_equal(found, BySession(spec, tables).batches())
    assert all(set(share.weights.tolist()) <= {0.0, 1.0} for ranks in shares for share in ranks)


def test_neighbours_with_one_list_have_one_bag(source: BatchSource, once: DataSpec, tables: list[pa.Table]) -> None:
    ids = plain_ids = 0
    for batch in client(source, once, "once").batches():
        assert batch.shared is not None
        assert batch.shared.features == (1,)
        inverse = batch.shared.inverse_B.tolist()
        assert inverse == sorted(inverse)
        bags = lists_of(batch, "list_items")
        rows = lists_of(batch.plain, "list_items")
        assert [bags[i] for i in inverse] == rows
        assert not any(bags[inverse[-1] + 1 :])
        ids, plain_ids = ids + sum(map(len, bags)), plain_ids + sum(map(len, rows))
    assert 0.3 < ids / plain_ids < 0.55  # sessions of three rows, cut by the ends of chunks and batches


def lists_of(batch: Batch, name: str) -> list[list[int]]:
    values, offsets = batch.sparse[name].values().tolist(), batch.sparse[name].offsets().tolist()
    return [values[a:b] for a, b in pairwise(offsets)]


def test_any_position_gives_the_same_rest(source: BatchSource, once: DataSpec) -> None:
    whole = list(client(source, once, "once").batches(Position(epoch=1)))
    for stop in (1, 7, len(whole)):
        rest = list(client(source, once, "once").batches(whole[stop - 1].position))
        assert all_equal(rest, whole[stop:])
        for a, b in zip(rest, whole[stop:], strict=True):
            assert a.shared is not None
            assert b.shared is not None
            assert a.shared.inverse_B.equal(b.shared.inverse_B)


def test_nothing_repeated_loses_nothing(days: list[pa.Table], make_warehouse: Maker, tmp_path: Path) -> None:
    tables = [day.append_column("session", day["row"]) for day in days]
    spec = make_warehouse(tmp_path, tables).model_copy(update={"session": "session", "deduplicate": GROUP})
    reader: Client = client(InlineSource({"days": spec}, CONFIG), spec)
    for found, expected in zip(reader.batches(), Reference(spec, tables).batches(), strict=True):
        assert all_equal([found], [expected])


def test_an_epoch_has_one_hash_whether_or_not_lists_are_shared(plain: DataSpec, once: DataSpec, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"executor": "inline"})
    first, second = (drain(spec, config, 97, 3, tmp_path / str(i)) for i, spec in enumerate((plain, once)))
    assert (first.order_hash, first.rows) == (second.order_hash, second.rows)


def test_work_done_again_gives_the_same_bytes(once: DataSpec) -> None:
    def hashes() -> list[str]:
        made = client(InlineSource({"days": once}, CONFIG), once).batches()
        return [hashlib.sha256(batch.sparse.values().numpy().tobytes()).hexdigest() for batch in made]

    assert hashes() == hashes()


@QUICK
@given(source=st.lists(st.integers(0, 3), min_size=1, max_size=20), cuts=st.lists(st.integers(0, 20), max_size=3))
def test_numbers_of_bags(source: list[int], cuts: list[int]) -> None:
    """Against a plain loop."""
    borders = sorted({0, len(source), *(cut for cut in cuts if cut < len(source))})
    shares = np.array([[a, b - a] for a, b in pairwise(borders)], np.int64)
    inverse, begins = kernels.number_bags(np.array(source, np.int64), shares)
    expected: list[int] = []
    for a, b in pairwise(borders):
        expected += [i for i, (_, run) in enumerate(groupby(source[a:b])) for _ in run]
    assert inverse.tolist() == expected
    assert [i for i, begin in enumerate(begins) if begin] == [
        i for i in range(len(source)) if i in borders or expected[i] != expected[i - 1]
    ]


def test_ids_that_repeat_are_stored_once(plain: DataSpec, once: DataSpec) -> None:
    sizes = []
    for spec in (plain, once):
        worker, writer = Worker(spec), PrivateWriter()
        worker.warm_up()
        worker.transform_split(Split(fragments=tuple(worker.fragments()[:3])), writer)
        sizes.append(sum(len(array) for name, array in writer.finish().items() if name.endswith("ids")))
    assert sizes[1] < 0.8 * sizes[0]


def test_deduplication_needs_sessions() -> None:
    with pytest.raises(ConfigError) as caught:
        PreprocessingConfig(deduplicate=GROUP)
    assert str(caught.value) == (
        "preprocessing.deduplicate: expected preprocessing.session_column to be set as well, got None: rows that are "
        "shuffled one by one have no neighbours of the same session. Set it to the column of sessions."
    )
