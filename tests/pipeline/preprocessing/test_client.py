"""The order of the rows is complete, resumable, decided by the seed alone and the same under every executor."""

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.errors import ContractError, DataError
from pipeline.jobs.training.rank.model import build_model
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.preprocessing.client import BatchSource, Client, InlineSource, ServiceSource
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.drain import drain
from pipeline.preprocessing.executors import InlineExecutor
from pipeline.preprocessing.service import Service
from pipeline.training.restore import Restore
from pipeline.training.state import checkpoint
from pipeline.training.state.checkpoints import Checkpoints
from pipeline.training.trainer import Trainer, TrainingData
from tests.pipeline.preprocessing.reference import (
    CONFIG,
    EXECUTORS,
    Reference,
    all_equal,
    alone,
    bags,
    client,
    column_of,
    corrupt,
    equal,
    expected_numbers,
    files_of,
    joined,
    numbers,
    order_hash,
    selected,
    source_of,
    stepping,
)

WINDOWS = {"table order": None, "small": 250, "bigger than the data": 10**9}
GOLDEN = {0: "e642c2cdf62533a0", 1: "a968fac92af447c1"}


@pytest.fixture
def spec(data: DataSpec, selection: str) -> DataSpec:
    return selected(data, selection)


def test_golden_order(source: BatchSource, data: DataSpec) -> None:
    for epoch, golden in GOLDEN.items():
        order = numbers(list(client(source, data).batches(Position(epoch=epoch))))
        assert hashlib.sha256(np.array(order, "<i8").tobytes()).hexdigest()[:16] == golden


@pytest.mark.parametrize("window", WINDOWS)
def test_batches_equal_the_reference(
    source: BatchSource, spec: DataSpec, selection: str, days: list[pa.Table], window: str
) -> None:
    """Bit for bit, positions included."""
    expected = Reference(spec, days).batches(epoch=1, window_rows=WINDOWS[window])
    found = list(client(source, spec, selection, window_rows=WINDOWS[window]).batches(Position(epoch=1)))
    assert all_equal(found, expected)
    assert order_hash(found) == order_hash(expected)
    assert sorted(numbers(found)) == expected_numbers(spec, days)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("batch_rows", [1, 97, 250, 3000])
def test_any_batch_size(source: BatchSource, data: DataSpec, days: list[pa.Table], batch_rows: int) -> None:
    found = list(client(source, data, batch_rows=batch_rows).batches())
    assert all_equal(found, Reference(data, days).batches(batch_rows=batch_rows))
    assert {batch.global_rows for batch in found[:-1]} <= {batch_rows}
    assert found[-1].global_rows == 2481 % batch_rows or batch_rows


def test_every_row_once_in_batches_of_the_size(
    source: BatchSource, spec: DataSpec, selection: str, days: list[pa.Table]
) -> None:
    batches = list(client(source, spec, selection).batches())
    expected = expected_numbers(spec, days)
    assert sorted(numbers(batches)) == expected
    sizes = [len(batch.labels) for batch in batches]
    assert sizes == [160] * (len(expected) // 160) + [len(expected) % 160] * (len(expected) % 160 > 0)
    assert [batch.global_rows for batch in batches] == sizes
    assert [batch.position.batches for batch in batches] == list(range(1, len(batches) + 1))


def test_a_row_keeps_its_label_and_ids(source: BatchSource, data: DataSpec, days: list[pa.Table]) -> None:
    table = pa.concat_tables(days)
    for batch in client(source, data).batches():
        rows = table.take(numbers([batch]))
        assert batch.labels.tolist() == rows["label"].to_pylist()
        assert [row[0] for row in bags(batch)] == [[user] for user in rows["cat_user"].to_pylist()]
        assert [len(row[1]) for row in bags(batch)] == [len(items) for items in rows["list_items"].to_pylist()]


def test_every_epoch_and_seed_has_its_own_order(source: BatchSource, data: DataSpec) -> None:
    keys = [(seed, epoch) for seed in (7, 8) for epoch in (0, 1, 2)]
    orders = [tuple(numbers(client(source, data, seed=seed).batches(Position(epoch=epoch)))) for seed, epoch in keys]
    assert len(set(orders)) == len(keys)
    assert len({tuple(sorted(order)) for order in orders}) == 1


def test_a_row_moves_no_further_than_its_window_but_groups_go_anywhere(source: BatchSource, data: DataSpec) -> None:
    order = np.array(numbers(list(client(source, data, window_rows=1).batches())))
    assert np.ptp(order[:100]) == 99  # one row group, its rows in some order
    assert order[:100].tolist() != sorted(order[:100].tolist())
    assert np.ptp(order) > 2000


def test_split_size_changes_nothing_but_what_is_read_together(data: DataSpec) -> None:
    hashes = set()
    for split_rows in (1, 150, 10**9):
        config = CONFIG.model_copy(update={"split_rows": split_rows})
        hashes.add(order_hash(client(InlineSource({"days": data}, config), data).batches()))
    assert len(hashes) == 1


# -- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 7])
@pytest.mark.parametrize("batch_rows", [160, 2480])
def test_shares_of_the_ranks_are_the_global_batch(
    source: BatchSource, data: DataSpec, days: list[pa.Table], world_size: int, batch_rows: int
) -> None:
    """2,481 rows: the last batch of 160 has 81 rows; one of 2,480 leaves a single row for all ranks."""
    whole = Reference(data, days).batches(batch_rows=batch_rows)
    ranks = [
        client(source, data, batch_rows=batch_rows, rank=rank, world_size=world_size).batches()
        for rank in range(world_size)
    ]
    for batch, *shares in zip(whole, *ranks, strict=True):
        assert {len(share.labels) for share in shares} == {-(-batch.global_rows // world_size)}
        assert {(share.position, share.global_rows) for share in shares} == {(batch.position, batch.global_rows)}
        assert equal(joined(shares), batch)
        for share in shares:
            padding = share.weights == 0
            assert set(share.weights.tolist()) <= {0.0, 1.0}
            assert not share.dense[padding].any()
            assert not share.labels[padding].any()
            assert all(row == [[], []] for row, pad in zip(bags(share), padding, strict=True) if pad)


def test_ranks_may_read_in_any_rhythm(executor: str, source: BatchSource, data: DataSpec, days: list[pa.Table]) -> None:
    """One rank runs ahead as far as it can, then another. The ranks of a service share what is made."""
    world_size, random = 3, np.random.default_rng(0)
    ranks = [client(source, data, rank=rank, world_size=world_size).batches() for rank in range(world_size)]
    found: list[list[Batch]] = [[] for _ in ranks]
    left = set(range(world_size))
    while left:
        rank = int(random.choice(sorted(left)))
        for _ in range(random.integers(1, 9)):
            batch = next(ranks[rank], None)
            if batch is None:
                left.discard(rank)
                break
            found[rank].append(batch)
    assert all_equal([joined(shares) for shares in zip(*found, strict=True)], Reference(data, days).batches())


def test_a_rank_may_stop_early_while_the_others_continue(
    source: BatchSource, data: DataSpec, days: list[pa.Table]
) -> None:
    """It may also start the next epoch while the others are still in the old one."""
    clients = [client(source, data, rank=rank, world_size=2) for rank in range(2)]
    first, second = (reader.batches() for reader in clients)
    shares = [next(first) for _ in range(3)]
    first.close()  # type: ignore[attr-defined]
    following = clients[0].batches(Position(epoch=1))
    ahead = [next(following)]
    rest = list(second)
    assert len(rest) == 16
    assert all_equal([joined(pair) for pair in zip(shares, rest[:3], strict=True)], Reference(data, days).batches()[:3])
    other = clients[1].batches(Position(epoch=1))
    found = [joined([ahead[0] if i == 0 else next(following), share]) for i, share in enumerate(other)]
    assert next(following, None) is None
    assert all_equal(found, Reference(data, days).batches(epoch=1))


# -- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize("window", WINDOWS)
def test_resume_gives_the_remaining_rows(source: BatchSource, spec: DataSpec, selection: str, window: str) -> None:
    settings = {"window_rows": WINDOWS[window]}
    whole = list(client(source, spec, selection, **settings).batches(Position(epoch=1)))
    for stop in {1, 2, len(whole) // 2, len(whole) - 1, len(whole)} if whole else ():
        rest = client(source, spec, selection, **settings).batches(whole[stop - 1].position)
        assert all_equal(rest, whole[stop:])


@pytest.mark.parametrize(
    "chain",
    [
        [("process", 1), ("inline", 2), ("process", 3)],
        pytest.param([("process", 1), ("inline", 2), ("ray", 1)], marks=pytest.mark.nightly),
        pytest.param([("process x4", 2), ("ray", 3), ("process x1", 1), ("inline", 7)], marks=pytest.mark.nightly),
        pytest.param([("ray", 2), ("process x1", 3), ("process x4", 1)], marks=pytest.mark.nightly),
    ],
    ids=lambda chain: ", ".join(f"{name} W={world_size}" for name, world_size in chain),
)
def test_resume_under_another_executor_worker_count_and_world_size(
    chain: list[tuple[str, int]], sources: Callable[[str], BatchSource], data: DataSpec, days: list[pa.Table]
) -> None:
    expected = Reference(data, days).batches(epoch=1)
    for stops in ([3, 9, 12], [1, 2, 15]):
        position, found = Position(epoch=1), list[Batch]()
        for (name, world_size), stop in zip(chain, [*stops[: len(chain) - 1], None], strict=True):
            readers = [client(sources(name), data, rank=rank, world_size=world_size) for rank in range(world_size)]
            ranks = [reader.batches(position) for reader in readers]
            with stepping(*ranks):
                while (stop is None or len(found) < stop) and (share := next(ranks[0], None)) is not None:
                    found.append(joined([share, *(next(rank) for rank in ranks[1:])]))
            position = found[-1].position
        assert all_equal(found, expected)


@pytest.mark.nightly
def test_an_epoch_drained_on_ray_is_that_of_this_process(
    sources: Callable[[str], BatchSource], data: DataSpec, tmp_path: Path
) -> None:
    sources("ray")  # starts Ray
    configs = [CONFIG.model_copy(update={"executor": name, "workers": 2}) for name in ("inline", "ray")]
    here, there = (drain(data, config, 160, 7, tmp_path / config.executor, warn=pytest.fail) for config in configs)
    same = {"order_hash", "rows", "batches", "bytes_read", "bytes_stored", "counts"}
    assert there.model_dump(include=same) == here.model_dump(include=same)
    assert (there.executor, there.workers, there.restarts) == ("ray", 2, 0)
    assert 1 <= len(there.peak_rss_mb) <= 2


def test_resume_reads_no_more_than_it_must(
    data: DataSpec, days: list[pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    submit = InlineExecutor.submit

    def noting(self: InlineExecutor, worker: int, name: str, work: object, inputs: object) -> None:
        read.append(getattr(work, "rows", 0))
        submit(self, worker, name, work, inputs)  # type: ignore[arg-type]

    position = Reference(data, days).batches()[-2].position
    monkeypatch.setattr(InlineExecutor, "submit", noting)
    assert len(list(alone(data).batches(position))) == 1
    assert 0 < sum(read) < 160 + 2 * 250


@pytest.mark.parametrize("taken", [0, 1, 2, 5])
def test_a_consumer_may_stop_anywhere(source: BatchSource, data: DataSpec, days: list[pa.Table], taken: int) -> None:
    expected = Reference(data, days).batches()
    reader = client(source, data)
    batches = reader.batches()
    assert all_equal([next(batches) for _ in range(taken)], expected[:taken])
    batches.close()  # type: ignore[attr-defined]
    assert all_equal(reader.batches(), expected)


def test_two_streams_at_once(source: BatchSource, data: DataSpec, days: list[pa.Table]) -> None:
    """A trainer does this when it validates in the middle of an epoch, more than once."""
    reference = Reference(data, days)
    expected, validation_batches = reference.batches(), reference.batches(window_rows=None, batch_rows=300)
    training, validation = client(source, data), client(source, data, "valid", batch_rows=300, window_rows=None)
    found = []
    for batch in training.batches():
        found.append(batch)
        if len(found) in (1, 7, 16):
            assert all_equal(validation.batches(), validation_batches)
    assert all_equal(found, expected)


def test_two_trainers_at_once(source: BatchSource, data: DataSpec, days: list[pa.Table]) -> None:
    """Their requests are equal, and neither takes the other's batches."""
    if isinstance(source, InlineSource):
        ours, theirs = client(source, data), client(source, data)
    else:
        ours, theirs = client(source, data), client(copy.copy(source), data)
    expected = Reference(data, days).batches()
    pairs = list(zip(ours.batches(), theirs.batches(), strict=True))
    assert all_equal([pair[0] for pair in pairs], expected)
    assert all_equal([pair[1] for pair in pairs], expected)


def test_batches_outlive_their_stream(source: BatchSource, data: DataSpec) -> None:
    reader = client(source, data)
    first = next(reader.batches())
    before = order_hash([first])
    list(reader.batches())
    assert order_hash([first]) == before
    first.dense[:] = 0.0  # a copy of this process alone
    assert order_hash([next(reader.batches())]) == before


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bad_label(
    days: list[pa.Table], make_warehouse: Callable[..., DataSpec], tmp_path_factory: pytest.TempPathFactory
) -> DataSpec:
    return make_warehouse(tmp_path_factory.mktemp("label"), [column_of(days[0], "label", 350, 2)])


@pytest.fixture(scope="module")
def bad_file(
    days: list[pa.Table], make_warehouse: Callable[..., DataSpec], tmp_path_factory: pytest.TempPathFactory
) -> DataSpec:
    spec = make_warehouse(tmp_path_factory.mktemp("file"), days[:1])
    corrupt(files_of(spec)[1])
    return spec


@pytest.mark.parametrize("name", ["bad_label", "bad_file"])
def test_errors_of_the_worker_are_the_same_everywhere(
    name: str, executor: str, sources: Callable[[str], BatchSource], data: DataSpec,
    request: pytest.FixtureRequest, tmp_path: Path,
) -> None:  # fmt: skip
    """The whole sentence equals that of a worker in this process. Two services of one process share its Ray."""
    spec: DataSpec = request.getfixturevalue(name)
    with pytest.raises(ContractError) as direct:
        list(alone(spec).batches())
    file = files_of(spec)[1]
    expected = {
        "bad_label": f"label 'label' in row group 0 of file 'file://{file}': expected 0 or 1, got 2. Correct the source and ingest the day with force=true.",
        "bad_file": f"file 'file://{file}' of snapshot {spec.snapshot.snapshot_id} of table 't': expected a whole Parquet file, got ",
    }[name]
    assert str(direct.value).startswith(expected)
    if executor == "ray":  # a second service of this process, which shares the first one's Ray
        next(iter(client(sources("ray"), data).batches()))
    kind, workers = EXECUTORS[executor]
    config = CONFIG.model_copy(update={"executor": kind, "workers": workers})
    assert collect_errors(spec, config, tmp_path / "service") == 2 * [str(direct.value)]


def collect_errors(spec: DataSpec, config: PreprocessingConfig, folder: Path) -> list[str]:
    """Returns the errors of two requests for unreadable rows. They must be equal."""
    said = []
    with Service({"days": spec}, config, folder) as service:
        for _ in range(2):
            with pytest.raises(ContractError) as caught:
                list(client(source_of(service), spec).batches())
            said.append(str(caught.value))
    return said


def test_a_service_that_is_gone_is_an_error(data: DataSpec) -> None:
    with pytest.raises(DataError) as caught:
        next(client(ServiceSource("dlrm-preprocessing-none"), data).batches())
    assert str(caught.value) == (
        "preprocessing service: expected batches, got none: its process ended. "
        "Run the command again to resume from the last checkpoint."
    )


# -- training ---------------------------------------------------------------------------------------------------------


def test_training_on_the_service_gives_the_weights_of_the_plain_reader(
    rank_spec: Callable[..., RankSpec],
    device: torch.device,
    sources: Callable[[str], BatchSource],
    data: DataSpec,
    days: list[pa.Table],
    tmp_path: Path,
) -> None:
    def trained(name: str, batches: Callable[[Position], object]) -> dict[str, torch.Tensor]:
        spec = rank_spec(tmp_path / name, epochs=2)
        model, _ = build_model(spec, 1, device)
        data, restore = TrainingData(batches), Restore(Checkpoints(tmp_path / name))  # type: ignore[arg-type]
        trainer = Trainer(model, spec.training, data, restore, lambda _: None, spec.seed, device)
        assert trainer.train().rows == 2 * 2481
        weights = checkpoint.full_state(trainer.model.state_dict())
        assert weights is not None
        return {key: value.clone() for key, value in weights.items()}

    reference = Reference(data, days)
    service: Client = client(sources("process"), data)

    def plain(position: Position) -> object:
        assert position.batches == 0
        return iter(reference.batches(position.epoch))

    expected, found = trained("reference", plain), trained("service", service.batches)
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)
