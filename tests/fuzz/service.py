"""Damaged messages between the master of the preprocessing service, its workers and the ranks.

Their sockets admit only processes of the same user. So a message may be damaged or out of order, but nobody attacks.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from pipeline.data.position import Position
from pipeline.data.selection import Selection
from pipeline.errors import ContractError, DataError, to_wire
from pipeline.preprocessing.client import Client, map_delivery
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.epoch.batches import BatchWork, BlockSlice
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.preprocessing.epoch.memory import PrivateWriter, Segment, Slabs
from pipeline.preprocessing.epoch.request import Request
from pipeline.preprocessing.epoch.splits import Split
from pipeline.preprocessing.executors import (
    InlineExecutor,
    WorkDone,
    WorkerDied,
    WorkerStarted,
    WorkFailed,
    parse_event,
    parse_task,
    run_work,
    wrap_work_error,
)
from pipeline.preprocessing.master import Master
from pipeline.preprocessing.rank_protocol import RankProtocol
from pipeline.preprocessing.transport import framing
from pipeline.preprocessing.transport.conversation import Connection, Conversation, Deliveries, Delivery, Incoming
from pipeline.preprocessing.worker import Worker
from pipeline.transforms.plan.plan import build_plan
from storage.config import WarehouseConfig
from tests.fuzz.harness import Case, require
from tests.fuzz.messages import open_descriptors, require_closed
from tests.fuzz.mutate import mutate_value
from tests.fuzz.tables import FEATURES, ingested

ROWS = "rows"
"""Name of the dataset."""
CONFIG = PreprocessingConfig(executor="inline", workers=1, memory_bytes=64 << 20, shuffle_window_rows=20, split_rows=15)
TURNS = 2_000
"""Within so many turns, a rank gets what it asked for."""


def make_spec(folder: Path) -> DataSpec:
    """Returns the data of a small table that is made in the folder."""
    warehouse, snapshot = ingested(folder)
    return DataSpec(
        warehouse=WarehouseConfig(), home=str(folder / "home"), snapshot=snapshot, label="label",
        selection=Selection(days=tuple(warehouse.day_rows(snapshot))),
        plan=build_plan(FEATURES, warehouse.schema(snapshot)),
    )  # fmt: skip


def _request(rows: int = 16) -> Request:
    return Request(
        data=ROWS, number=0, position=Position(), batch_rows=rows, seed=3, window_rows=20, world_size=1, ranks=(0,)
    )


def _receive(random: Random, message: Any) -> framing.Message:
    """Damages a message. What is no JSON object does not pass the socket."""
    damaged = json.loads(json.dumps(mutate_value(random, message)))
    if not isinstance(damaged, dict):
        raise ContractError("message", "an object", "another value", "Send it again.")
    return damaged


def _descriptors(random: Random, memory: int | None) -> list[int]:
    """Returns the descriptors of a message, mostly the right ones."""
    given = [] if memory is None else [os.dup(memory)]
    if random.random() < 0.3:
        small = os.memfd_create("fuzz", os.MFD_CLOEXEC)
        others = [small, os.open("/dev/null", os.O_RDWR), os.open("/", os.O_RDONLY)]
        if given:
            others.append(given[0])
        chosen = random.choices(others, k=random.choice([0, 1, 1, 2]))
        given = [os.dup(one) for one in chosen]
        framing.close(others)
    return given


@contextmanager
def workers(folder: Path) -> Iterator[Case]:
    """Messages of workers to the master."""
    spec = make_spec(folder)
    slabs, worker = Slabs(), Worker(spec)
    writer = slabs.writer()
    rows, costs = worker.transform_split(Split(fragments=tuple(worker.fragments()[:2])), writer)
    memory = writer.finish()
    done = {"shapes": memory.shapes, "size": memory.size, "rows": rows, "peak_rss_mb": 9, "costs": vars(costs)}
    failed = {"error": to_wire(DataError("a", "b", "c", "D."))}
    examples: list[tuple[Any, int | None]] = [({"pid": 7}, None), (failed, None), *[(done, memory.fd)] * 4]

    def case(random: Random) -> None:
        message, descriptor = random.choice(examples)
        damaged = _receive(random, message)
        before = open_descriptors()
        event = parse_event(1, damaged, _descriptors(random, descriptor))
        require(isinstance(event, WorkerStarted | WorkDone | WorkFailed | WorkerDied), "an event")
        if isinstance(event, WorkDone):
            event.memory.arrays()
            require(event.rows == rows, "other rows")
            event.memory.close()
            Costs().add(event.costs)
        require_closed(before)
        if isinstance(event, WorkerDied):
            raise ContractError("message", "of a worker", "another", "Replace it.")

    yield case
    memory.close()


@contextmanager
def work(folder: Path) -> Iterator[Case]:
    """Messages of the master to workers."""
    spec = make_spec(folder)
    worker = Worker(spec)
    split = Split(fragments=tuple(worker.fragments()[:2]))
    slabs = Slabs()
    writer = slabs.writer()
    worker.transform_split(split, writer)
    memory = writer.finish()
    window = BlockSlice(number=0, splits=(0,), start=0, stop=20)
    batches = BatchWork(seed=3, epoch=0, shuffled=True, world_size=1, ranks=(0,), batches=((window,), (window,)))
    note = {"shapes": memory.shapes, "size": memory.size}
    examples: list[tuple[Any, int | None]] = [
        ({"data": ROWS, "work": split.model_dump(mode="json"), "inputs": []}, None),
        ({"data": ROWS, "work": batches.model_dump(mode="json"), "inputs": [note]}, memory.fd),
    ]

    def case(random: Random) -> None:
        message, descriptor = random.choice(examples)
        damaged = _receive(random, message)
        given = _descriptors(random, descriptor)
        try:
            task, inputs = parse_task(damaged, given)
            if isinstance(task.work, Split):  # the windows of batches are the master's own
                _run(worker, task.work)
            for segment in inputs:
                segment.arrays()
        finally:
            framing.close(given)

    yield case
    memory.close()


def _run(worker: Worker, split: Split) -> None:
    try:
        run_work(worker, split, [], PrivateWriter())
    except Exception as error:  # as a worker does
        raise wrap_work_error(error, split) from None


class Channel:
    """A connection's messages to a rank, with descriptors."""

    def __init__(self) -> None:
        self.inbox: list[tuple[framing.Message, list[int]]] = []
        self.closed = False


class House:
    """A master with its side of the protocol, and the ranks' ends of the connections.

    Args:
        worker: Does the work.
    """

    def __init__(self, spec: DataSpec, worker: Worker, folder: Path) -> None:
        class Ready(InlineExecutor):
            """Has a worker already."""

            def start(self, number: int) -> None:
                self.workers = {ROWS: worker}
                self.events.put(WorkerStarted(number, os.getpid()))

        self.master = Master({ROWS: spec}, CONFIG, folder, make=lambda data, config, *rest: Ready(data, *rest))
        self.master.fragments[ROWS] = worker.fragments()
        self.protocol = RankProtocol(self.master, self._send, self._hang_up)

    @staticmethod
    def _send(connection: Connection, message: framing.Message, descriptors: list[int]) -> None:
        if connection.channel.closed:
            raise BrokenPipeError
        copies = [os.dup(descriptor) for descriptor in descriptors]
        connection.channel.inbox.append((json.loads(json.dumps(message)), copies))

    @staticmethod
    def _hang_up(connection: Connection) -> None:
        connection.channel.closed = True

    def put(self, connection: Connection, message: framing.Message | None) -> None:
        """Delivers a message to the master. None: the connection was closed."""
        self.protocol.turn(Incoming(connection, message))

    def turn(self) -> None:
        """Lets the master work."""
        self.protocol.turn(self.master.next_event(0))


def _read(house: House, random: Random | None, strangers: Sequence[tuple[Connection, list[Any]]]) -> Iterator[Delivery]:
    """Reads an epoch as a rank does, while strangers send messages."""
    talk = Conversation(_request(), 0)
    own = Connection(Channel())
    waiting = talk.open()
    for _ in range(TURNS):
        speaking = [pair for pair in strangers if pair[1]]
        if random is not None and speaking and random.random() < 0.6:
            connection, messages = random.choice(speaking)
            house.put(connection, messages.pop(0))
        elif waiting:
            house.put(own, waiting.pop(0))
        house.turn()
        if own.channel.inbox:
            answer, descriptors = own.channel.inbox.pop(0)
            try:
                following = talk.follow(answer, 0.1)
                if following is None:
                    return
                waiting.append(following)
                yield map_delivery(talk.request, answer, descriptors)
            finally:
                framing.close(descriptors)
        require(not own.channel.closed, "a rank was disconnected")
    require(False, "a rank waits for ever")


def _close(strangers: Sequence[tuple[Connection, list[Any]]]) -> None:
    for connection, _ in strangers:
        for _, descriptors in connection.channel.inbox:
            framing.close(descriptors)


def _labels(deliveries: Iterator[Delivery]) -> list[bytes]:
    return [np.concatenate([arrays["labels"], arrays["dense"].ravel()]).tobytes() for _, arrays in deliveries]


@contextmanager
def conversation(folder: Path) -> Iterator[Case]:
    """Messages of ranks, in any order. Whatever others send, a rank gets its rows, or a reason."""
    spec = make_spec(folder)
    worker = Worker(spec)
    opening, *takes = Conversation(_request(), 0).open()
    takes += [{"take": number, "done": number - 2, "rows": 16, "waited": 0.1} for number in (1, 2, 3)]

    def run(random: Random | None, strangers: Sequence[tuple[Connection, list[Any]]]) -> list[bytes]:
        house = House(spec, worker, folder / "service")
        try:
            return _labels(_read(house, random, strangers))
        finally:
            _close(strangers)
            house.master.close()

    expected = run(None, ())

    def case(random: Random) -> None:
        strangers = []
        for _ in range(random.choice([1, 1, 2, 3])):
            messages = [opening, *takes]
            if random.random() < 0.3:
                random.shuffle(messages)
            sent = [mutate_value(random, one) if random.random() < 0.4 else one for one in messages]
            sent = [one for one in sent if isinstance(one, dict)][: random.randrange(6)]
            strangers.append((Connection(Channel()), [*sent, None]))
        before = open_descriptors()
        require(run(random, strangers) == expected, "other rows than an undisturbed rank's")
        require_closed(before)

    yield case


class _Given:
    """A source that delivers what it is given."""

    def __init__(self, deliver: Callable[[Request], Delivery]) -> None:
        self.deliver = deliver

    def ranks(self, rank: int, world_size: int) -> tuple[int, ...]:
        return (0,)

    def groups(self, request: Request, rank: int) -> Deliveries:
        yield self.deliver(request)
        return ()


@contextmanager
def deliveries(folder: Path) -> Iterator[Case]:
    """Messages of the service to a rank."""
    spec = make_spec(folder)
    house = House(spec, Worker(spec), folder / "service")
    rank = Connection(Channel())
    for message in Conversation(_request(), 0).open():
        house.put(rank, message)
    while not rank.channel.inbox:
        house.turn()
    delivered, (memory,) = rank.channel.inbox[0]
    house.master.close()
    lost = {"epoch": 0, "path": "p", "row_group": 1, "rows": 3}
    examples: list[tuple[Any, int | None]] = [({"end": [lost]}, None), *[(delivered, memory)] * 4]

    def case(random: Random) -> None:
        message, descriptor = random.choice(examples)
        damaged = _receive(random, message)
        before = open_descriptors()
        given = _descriptors(random, descriptor)

        def deliver(request: Request) -> Delivery:
            talk = Conversation(request, 0)
            if talk.follow(damaged, 0.1) is None:
                return [], {}
            return map_delivery(request, damaged, given)

        try:
            batches = list(Client(_Given(deliver), (ROWS, spec), 16, 3, 20).batches())
            require(all(batch.dense.shape[0] == len(batch.labels) for batch in batches), "rows of a batch")
            del batches
        finally:
            framing.close(given)
        require_closed(before)

    yield case
    Segment(memory, {}, 0).close()
