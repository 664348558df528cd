"""Ranks connect, stay away, hang and send invalid messages; the service ends or fails."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.errors import ContractError, DataError
from pipeline.preprocessing import service as module
from pipeline.preprocessing.client import Client
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.master import Master
from pipeline.preprocessing.service import Service
from pipeline.preprocessing.transport import framing
from tests.pipeline.preprocessing.reference import CONFIG, ROOT, Reference, all_equal, client, eventually, source_of

GONE = (
    "preprocessing service: expected batches, got none: its process ended. "
    "Run the command again to resume from the last checkpoint."
)
Serve = Callable[..., Service]


@pytest.fixture
def masters(monkeypatch: pytest.MonkeyPatch) -> list[Master]:
    """Collects the masters of the services that a test starts."""
    made: list[Master] = []

    class Noted(Master):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(module, "Master", Noted)
    return made


@pytest.fixture
def service(serve: Serve) -> Service:
    """A service that does its work inline, because these tests are about its messages."""
    return serve(executor="inline", workers=1)


def reading(service: Service, data: DataSpec, **settings: object) -> Client:
    return client(source_of(service), data, **settings)


def outcome(reader: Client) -> tuple[threading.Thread, list[object]]:
    """Reads an epoch in a thread. Returns the thread and a list that receives the batches and the final error."""
    found: list[object] = []

    def read() -> None:
        try:
            found.extend(reader.batches())
        except ContractError as error:
            found.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    return thread, found


@pytest.mark.parametrize("executor", ["inline", "process"])
def test_a_service_may_end_while_ranks_wait(executor: str, serve: Serve, data: DataSpec, tmp_path: Path) -> None:
    """One of two ranks takes no batches. The other runs out of memory and waits."""
    config = CONFIG.model_copy(update={"executor": executor})
    with Service({"days": data}, config, tmp_path / "ended") as service:
        idle = reading(service, data, rank=1, world_size=2).batches()
        first = reading(service, data, rank=0, world_size=2).batches()
        next(first), next(idle)
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        silent.connect(f"\0{service.address}")
        # The service ends before a worker can serve this request.
        thread, found = outcome(reading(service, data, seed=3))
        service.__exit__(None, None, None)
        thread.join(30)
        assert not thread.is_alive()
        assert found == [] or found[-1] == GONE or len(found) == 16
        with pytest.raises(DataError) as caught:
            list(idle)
        assert str(caught.value) == GONE
        assert silent.recv(1) == b""
        silent.close()


def test_ranks_that_are_gone_leave_no_stream(
    masters: list[Master], serve: Serve, data: DataSpec, days: list[pa.Table]
) -> None:
    service = serve(executor="inline", workers=1)
    for taken in (0, 1, 5):
        for world_size in (1, 2):
            ranks = [reading(service, data, rank=rank, world_size=world_size).batches() for rank in range(world_size)]
            for batches in ranks[: taken + 1]:
                for _ in range(taken):
                    next(batches)
            for batches in ranks:
                batches.close()  # type: ignore[attr-defined]
    eventually(lambda: not masters[0].streams)
    assert all_equal(reading(service, data).batches(), Reference(data, days).batches())
    eventually(lambda: not masters[0].streams)


def test_a_rank_may_be_gone_before_another_comes(
    masters: list[Master], serve: Serve, data: DataSpec, days: list[pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late rank gets its share of every batch and waits for no other."""
    monkeypatch.setattr("pipeline.preprocessing.epoch.stream.GROUP_ROWS", 160)
    service = serve(executor="inline", workers=1, memory_bytes=100_000)
    early = reading(service, data, rank=0, world_size=2).batches()
    next(early)
    early.close()  # type: ignore[attr-defined]
    eventually(lambda: not masters[0].streams)
    shares = list(reading(service, data, rank=1, world_size=2).batches())
    whole = Reference(data, days).batches()
    assert [share.global_rows for share in shares] == [batch.global_rows for batch in whole]
    eventually(lambda: not masters[0].streams)
    assert masters[0].left == {}
    both = [reading(service, data, rank=rank, world_size=2).batches() for rank in range(2)]
    assert len(list(zip(*both, strict=True))) == 16


def test_ranks_that_restart_get_new_streams(
    masters: list[Master], serve: Serve, data: DataSpec, days: list[pa.Table]
) -> None:
    """They send the same requests again while the first streams still exist."""
    service = serve(executor="inline", workers=1)
    old = [reading(service, data, rank=rank, world_size=2).batches() for rank in range(2)]
    for batches in old:
        for _ in range(12):
            next(batches)
    new = [reading(service, data, rank=rank, world_size=2).batches() for rank in range(2)]
    assert len(list(zip(*new, strict=True))) == 16
    assert [len(list(batches)) for batches in old] == [4, 4]


def test_an_unexpected_error_reaches_all_ranks(
    masters: list[Master],
    serve: Serve,
    data: DataSpec,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Waiting ranks and later ones get the message. The traceback is printed."""
    service = serve(executor="inline", workers=1)
    first = reading(service, data).batches()
    next(first)

    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr(masters[0].pool.autoscaler, "after", broken)
    monkeypatch.setattr(masters[0].pool, "scale", broken)
    expected = "preprocessing service: expected to keep running, got ZeroDivisionError: division by zero. See the traceback above."
    threads = [outcome(reading(service, data, seed=seed)) for seed in (1, 2)]
    for thread, found in threads:
        thread.join(30)
        assert found == [expected]
    assert "ZeroDivisionError" in capsys.readouterr().err
    thread, found = outcome(reading(service, data, seed=3))
    thread.join(30)
    assert found == [expected]


def test_an_error_while_batches_are_delivered_does_not_hang(
    masters: list[Master], serve: Serve, data: DataSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example when the machine that held a result is lost."""
    service = serve(executor="inline", workers=1)
    batches = reading(service, data).batches()
    next(batches)

    def lost(memory: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(masters[0].executor, "deliver", lost)
    with pytest.raises(ContractError) as caught:
        list(batches)
    assert str(caught.value) == (
        "preprocessing service: expected to keep running, got KeyError: 'lost'. See the traceback above."
    )


def test_an_unknown_dataset_is_refused_and_others_continue(
    service: Service, data: DataSpec, days: list[pa.Table]
) -> None:
    with pytest.raises(ContractError) as caught:
        next(client(source_of(service), data, "nothing").batches())
    assert str(caught.value) == (
        "preprocessing service: expected the name of a dataset: 'days', got 'nothing'. Request one of them."
    )
    assert all_equal(reading(service, data).batches(), Reference(data, days).batches())


OPEN: framing.Message = {
    "open": {
        "data": "days", "number": 0, "position": {}, "batch_rows": 160, "seed": 9, "window_rows": 250, "world_size": 1,
        "ranks": [0],
    },
    "rank": 0,
}  # fmt: skip
TAKE: framing.Message = {"take": 0, "done": -2, "rows": 0, "waited": 0.0}
MALFORMED: list[list[framing.Message]] = [
    [{}], [TAKE], [{"open": 3}], [{"open": {"data": "days"}, "rank": 0}], [{"open": {}, "rank": "x"}],
    *([OPEN | {"rank": rank}] for rank in (1, -1, None, [0])),
    *(
        [{"open": OPEN["open"] | {key: value}, "rank": 0}]
        for key, value in {
            "batch_rows": 0, "window_rows": -1, "world_size": 0, "ranks": [], "seed": -1, "position": {"window": -4},
            "number": "first",
        }.items()
    ),
    [{"open": OPEN["open"] | {"ranks": [0, 1]}, "rank": 0}],
    [OPEN, OPEN],
    *([OPEN, {key: value for key, value in TAKE.items() if key != left}] for left in TAKE),
    *([OPEN, TAKE | {key: value}] for key, value in {"take": 3, "done": 7, "rows": "many", "waited": -1.0}.items()),
    [OPEN, TAKE, TAKE],
]  # fmt: skip


def test_a_malformed_message_ends_only_its_own_connection(
    service: Service, data: DataSpec, days: list[pa.Table]
) -> None:
    """Nobody else waits for an answer, and the ranks get all batches."""
    descriptor = os.memfd_create("dlrm-test")
    before = reading(service, data).batches()
    first = next(before)
    channels = []
    for messages in MALFORMED:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        channel.connect(f"\0{service.address}")
        for message in messages:
            with suppress(OSError):  # it may be closed after the first one
                framing.send(channel, message, [descriptor])
        channels.append(channel)
    garbage = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    garbage.connect(f"\0{service.address}")
    garbage.sendall(b"GET / HTTP/1.1\r\n\r\n")
    for channel, messages in zip(channels, MALFORMED, strict=True):
        channel.settimeout(30.0)
        with channel:
            while framing.receive(channel) is not None:  # the answer to what was right
                pass
            assert channel.recv(1) == b"", messages
    garbage.close()
    os.close(descriptor)
    expected = Reference(data, days).batches()
    assert all_equal([first, *before], expected)
    assert all_equal(reading(service, data).batches(), expected)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_other_users_are_not_let_in(service: Service) -> None:
    code = "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + sys.argv[1]); print(s.recv(1))"  # fmt: skip
    found = subprocess.run([sys.executable, "-c", code, service.address], capture_output=True, text=True, check=True)
    assert found.stdout == "b''\n"


def test_a_service_that_cannot_start_raises_the_reason(data: DataSpec, tmp_path: Path, nothing_left: None) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError), Service({"days": data}, PreprocessingConfig(), tmp_path / "file"):
        pass


def test_many_small_batches_do_not_block_the_master(
    serve: Serve, data: DataSpec, days: list[pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message about a group of batches is longer than a socket's buffer. One rank does not read its answer,
    because it is training and waits there for the other rank, which has no answer yet."""
    monkeypatch.setattr("pipeline.preprocessing.epoch.stream.GROUP_ROWS", 1000)
    service = serve(executor="inline", workers=1)
    settings = {"batch_rows": 1, "world_size": 2, "window_rows": 10**9}
    ahead, behind = (reading(service, data, rank=rank, **settings).batches() for rank in range(2))
    next(ahead)  # also requests the second group
    thread, found = outcome(reading(service, data, seed=5))
    thread.join(60)
    assert len(found) == 16
    assert len([next(behind)]) == 1
    assert sum(share.weights.sum() for shares in zip(ahead, behind, strict=False) for share in shares) >= 2479


@pytest.mark.nightly
@pytest.mark.parametrize("taken", [1, pytest.param(7, marks=pytest.mark.nightly)])
def test_a_client_that_is_killed_does_not_hurt_a_later_one(
    taken: int, masters: list[Master], serve: Serve, data: DataSpec, days: list[pa.Table], tmp_path: Path
) -> None:
    service = serve(executor="inline", workers=1)
    code = """
import sys
from pathlib import Path
from pipeline.preprocessing.client import ServiceSource
from pipeline.preprocessing.dataset import DataSpec
from tests.pipeline.preprocessing.reference import client
spec = DataSpec.model_validate_json(Path(sys.argv[2]).read_text())
batches = client(ServiceSource(sys.argv[1]), spec).batches()
for _ in range(int(sys.argv[3])):
    next(batches)
print("there", flush=True)
sys.stdin.read()
"""
    (tmp_path / "spec.json").write_text(data.model_dump_json())
    command = [sys.executable, "-W", "ignore", "-c", code, service.address, str(tmp_path / "spec.json"), str(taken)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        assert len(masters[0].streams) == 1
        process.kill()
    assert all_equal(reading(service, data).batches(), Reference(data, days).batches())
    eventually(lambda: not masters[0].streams)
