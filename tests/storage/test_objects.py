"""Files of an S3 server: listed as pathlib lists the same tree on a disk, opened, and read by DuckDB."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import duckdb
import pytest

from pipeline.data.formats.files import find_files, stamp
from pipeline.data.formats.reading import as_pattern
from storage import objects
from storage.config import WarehouseConfig
from storage.errors import StorageError
from storage.objects import CHECKSUMS, ObjectFile, ObjectFolder, find_objects, open_file, send_lengths
from storage.query import connect
from storage.warehouse import Warehouse
from tests.objects import Store, serving_objects

NAMES = ("a.csv", "day=1/a.csv", "day=1/b.csv", "day=2/deep/c.csv", "day=2/x [1]*?.csv", "d.csv/e.csv", "unlike/a.txt")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for number, name in enumerate(NAMES):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"number,word\n{number},a\n")
    return root


@pytest.fixture(scope="module")
def store(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with serving_objects(tmp_path_factory.mktemp("store")) as one:
        one.upload(tree, "in/")
        yield one


@pytest.mark.nightly
@pytest.mark.parametrize(
    "pattern",
    ["*.csv", "*/*.csv", "day=[12]/*", "day=?/a.csv", "**/*.csv", "day=2/**/*.csv", "d*/*", "a.csv", "day=1", "*/no"],
)
def test_a_pattern_finds_what_it_finds_on_a_disk(store: Store, tree: Path, pattern: str) -> None:
    found = find_objects(f"s3://logs/in/{pattern}", store.properties)
    expected = [path for path in tree.glob(pattern) if path.is_file()]
    assert [one.address for one in found] == sorted(f"s3://logs/in/{path.relative_to(tree)}" for path in expected)
    by_name = {f"{path.relative_to(tree)}": path.stat().st_size for path in expected}
    assert [one.size for one in found] == [by_name[one.address.removeprefix("s3://logs/in/")] for one in found]


@pytest.mark.slow
def test_duckdb_reads_given_objects_and_no_others(store: Store, tree: Path, tmp_path: Path) -> None:
    files = find_objects("s3://logs/in/day=*/*.csv", store.properties)
    allowed = [*map(str, files), *map(as_pattern, files)]
    with connect([], tmp_path, objects=allowed, properties=store.properties) as connection:
        rows = (
            connection.read_csv([as_pattern(one) for one in files], filename=True).select("number, filename").fetchall()
        )
        assert {name: number for number, name in rows} == {
            f"s3://logs/in/{NAMES[number]}": number for number in (1, 2, 4)
        }
        with pytest.raises(duckdb.Error, match="Cannot access file"):
            connection.read_csv("s3://logs/in/a.csv").fetchall()


@pytest.mark.nightly
def test_access_comes_from_the_environment_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.variables.items():
        monkeypatch.setenv(name, value)
    with open_file("s3://logs/in/day=1/b.csv", {}) as file:
        assert file.read() == b"number,word\n2,a\n"
    assert len(find_files(["s3://logs/in/*.csv", "s3://logs/in/a.csv"], Path(), "source.path")) == 1


@pytest.mark.nightly
def test_a_changed_object_has_another_stamp(store: Store) -> None:
    before = find_objects("s3://logs/in/a.csv", store.properties)
    assert isinstance(before[0], ObjectFile)
    store.client().put_object(Bucket=store.bucket, Key="in/a.csv", Body=b"number,word\n10,a\n")
    (after,) = find_objects("s3://logs/in/a.csv", store.properties)
    assert stamp(after) != stamp(before[0])
    store.client().put_object(Bucket=store.bucket, Key="in/a.csv", Body=b"number,word\n0,a\n")


@pytest.mark.nightly
def test_a_store_that_does_not_answer_is_not_an_empty_one(store: Store) -> None:
    with pytest.raises(StorageError, match=r"expected a store that answers, got .*Could not connect"):
        find_objects("s3://logs/in/*.csv", store.properties | {"s3.endpoint": "http://127.0.0.1:9"})
    with pytest.raises(StorageError, match=r"begins with one of s3, .*, got 'ftp'"):
        find_objects("ftp://logs/*.csv", {})


class Gateway(BaseHTTPRequestHandler):
    """Hands requests on to the store, but refuses content without a length before it, as Ceph 16 does."""

    protocol_version, upstream = "HTTP/1.1", ""

    def do_PUT(self) -> None:
        if "content-length" not in self.headers:
            self.close_connection = True
            self._answer(411, b"")
            return
        self._forward(self.rfile.read(int(self.headers["content-length"])))

    do_POST = do_PUT

    def do_GET(self) -> None:
        self._forward(b"")

    def _forward(self, body: bytes) -> None:
        port = int(self.upstream.rpartition(":")[2])
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        self._answer(answer.status, answer.read(), {name: answer.headers[name] for name in answer.headers})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        self.send_header("content-length", f"{len(body)}")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def serving(kind: type[Gateway], store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Runs a gateway before the store. Yields access to it."""
    monkeypatch.setattr(Gateway, "upstream", store.endpoint)
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield store.properties | {"s3.endpoint": f"http://127.0.0.1:{server.server_port}"}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.nightly
def test_a_store_that_wants_lengths_is_written_to(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHECKSUMS, raising=False)
    with serving(Gateway, store, monkeypatch) as properties:
        monkeypatch.setenv(CHECKSUMS, "when_supported")  # what the environment says is kept
        with pytest.raises(StorageError, match="411"):
            ObjectFolder("s3://logs/lengths", {**properties, "s3.connect-timeout": "9"}).write("a", b"1")
        monkeypatch.delenv(CHECKSUMS)
        ObjectFolder("s3://logs/lengths", properties).write("a", b"2")
    assert ObjectFolder("s3://logs/lengths", store.properties).read("a") == b"2"


@pytest.mark.slow
@pytest.mark.parametrize("boto3", [True, False])
def test_a_file_is_replaced_only_if_it_is_as_it_was_read(
    store: Store, monkeypatch: pytest.MonkeyPatch, boto3: bool
) -> None:
    if not boto3:
        monkeypatch.setattr(objects, "_boto3_client", lambda properties: None)
    folder = ObjectFolder(f"s3://logs/swap-{boto3}", store.properties)
    assert not folder.swap("a", b"0", b"1")
    assert folder.names() == []
    assert folder.swap("a", None, b"1")
    assert not folder.swap("a", None, b"2")
    assert not folder.swap("a", b"2", b"3")
    assert folder.read("a") == b"1"
    assert folder.swap("a", b"1", b"4")
    assert folder.read("a") == b"4"


class Cut(Gateway):
    """Loses the answer to the first write, which the client then repeats."""

    left = 1

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
        if self.command == "PUT" and self.left:
            Cut.left -= 1
            self.close_connection = True
            return
        super()._answer(status, body, headers)


@pytest.mark.nightly
def test_a_file_that_is_replaced_while_it_is_read_is_the_old_or_the_new_one(store: Store) -> None:
    folder, contents = ObjectFolder("s3://logs/replaced", store.properties), [b"a" * 1_000, b"b" * 3_000]
    folder.write("file", contents[0])
    ended = threading.Event()

    def replace() -> None:
        client, number = store.client(), 0
        while not ended.is_set():
            number = 1 - number
            client.put_object(Bucket=store.bucket, Key="replaced/file", Body=contents[number])

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        found = [folder.read("file") for _ in range(100)]
    finally:
        ended.set()
        writer.join()
    assert {content for content in found if content is not None} == set(contents)


@pytest.mark.nightly
def test_a_write_whose_answer_was_lost_is_not_taken_for_that_of_another(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Cut, store, monkeypatch) as properties:
        for before, content in ((None, b"1"), (b"1", b"2")):
            monkeypatch.setattr(Cut, "left", 1)
            assert ObjectFolder("s3://logs/cut", properties).swap("a", before, content)
            assert Cut.left == 0
    assert ObjectFolder("s3://logs/cut", store.properties).read("a") == b"2"


class Away(Gateway):
    """Does not answer the first requests."""

    left = 0

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
        if self.left:
            Away.left -= 1
            self.close_connection = True
            return
        super()._answer(status, body, headers)


@pytest.mark.nightly
def test_a_patient_request_outlives_a_store_that_is_away(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3 waits as long as pyarrow does. Here it only counts for how long it would."""
    waits: list[float] = []
    monkeypatch.setattr("botocore.endpoint.time.sleep", waits.append)
    with serving(Away, store, monkeypatch) as properties:
        folder = ObjectFolder("s3://logs/away", properties)
        monkeypatch.setattr(Away, "left", 12)
        with pytest.raises(StorageError, match="expected a store that answers"):
            folder.swap("a", None, b"1")
        monkeypatch.setattr(Away, "left", 12)
        assert folder.patient().swap("a", None, b"1")
        assert len(waits) == 2 + 12
    assert ObjectFolder("s3://logs/away", store.properties).read("a") == b"1"


class Plain(Gateway):
    """Knows no preconditions."""

    def do_PUT(self) -> None:
        if "If-Match" in self.headers or "If-None-Match" in self.headers:
            self.rfile.read(int(self.headers["content-length"]))
            self._answer(501, b"<Error><Code>NotImplemented</Code></Error>")
        else:
            super().do_PUT()


class Stubborn(Gateway):
    """Refuses every precondition."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")


@pytest.mark.nightly
def test_a_store_without_preconditions_is_written_to_and_one_that_refuses_all_is_an_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Plain, store, monkeypatch) as properties:
        folder = ObjectFolder("s3://logs/plain", properties)
        assert folder.swap("a", None, b"1")
        assert folder.swap("a", b"1", b"2")
        assert not folder.swap("a", b"1", b"3")
    refused = pytest.raises(StorageError, match="got 10 refusals to replace a file that nobody has changed")
    with serving(Stubborn, store, monkeypatch) as properties, refused:
        ObjectFolder("s3://logs/plain", properties).swap("a", b"2", b"3")
    assert ObjectFolder("s3://logs/plain", store.properties).read("a") == b"2"
    away = ObjectFolder("s3://logs/plain", store.properties | {"s3.endpoint": "http://127.0.0.1:9"})
    with pytest.raises(StorageError, match="expected a store that answers, got Could not connect"):
        away.swap("a", b"2", b"3")


@pytest.mark.nightly
def test_access_that_boto3_is_not_told_of_is_not_used_with_it(store: Store) -> None:
    role = store.properties | {"s3.role-arn": "arn:aws:iam::1:role/x"}
    assert objects._s3_client("s3://logs/a", role) is objects._s3_client("gs://logs/a", store.properties) is None
    assert objects._s3_client("s3a://logs/a", store.properties) is not None


@pytest.mark.nightly
def test_amazon_is_written_to_as_its_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHECKSUMS, raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    send_lengths({"s3.region": "eu-west-1"})
    send_lengths({"s3.endpoint": "https://s3.eu-west-1.amazonaws.com"})
    assert CHECKSUMS not in os.environ
    monkeypatch.setenv(CHECKSUMS, "when_supported")
    send_lengths({"s3.endpoint": "http://127.0.0.1:9"})
    assert os.environ[CHECKSUMS] == "when_supported"


@pytest.mark.nightly
def test_an_endpoint_of_pyicebergs_own_settings_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHECKSUMS, raising=False)
    monkeypatch.setenv("PYICEBERG_CATALOG__DLRM__S3__ENDPOINT", "http://127.0.0.1:9")
    Warehouse(WarehouseConfig(), tmp_path).catalog  # noqa: B018  opened on first use
    assert os.environ[CHECKSUMS] == "when_required"
    monkeypatch.delenv(CHECKSUMS)
