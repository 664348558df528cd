"""Files of object stores by their addresses, such as s3://bucket/logs/day=*/part-*.parquet."""

import errno
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.config import SCHEMES
from storage.errors import StorageError

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa
    from fsspec import AbstractFileSystem
    from pyarrow import fs as pa_fs

_WILD = re.compile(r"[*?\[]")
_ANSWER = re.compile(r"^\w*Error: (.+)", re.MULTILINE)
_ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]+://")
_VARIABLES = {
    "AWS_DEFAULT_REGION": "client.region",  # pyiceberg prefers s3.region, which a config may give
    "AWS_REGION": "client.region",
    "AWS_ENDPOINT_URL": "s3.endpoint",
    "AWS_ENDPOINT_URL_S3": "s3.endpoint",
}
"""Variables that Amazon's tools read and pyarrow does not. Later ones take precedence."""
AMAZON = "amazonaws.com"
CHECKSUMS = "AWS_REQUEST_CHECKSUM_CALCULATION"
"""Amazon's variable. Its library reads it for each client that it makes."""
_RETRIES = "s3.retry-strategy-impl"
"""pyiceberg's property for what makes pyarrow's retry strategy."""
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of a disk of this host, which no store answers."""
_ATTEMPTS = 10
"""Of a patient request: pyarrow waits for 1, 2, 4, 8, 16 and then 20 seconds at most, and for half of it on average."""
_BOTO3_ATTEMPTS = 15
"""The same for boto3, which begins with a twentieth of a second."""
COPY_BYTES = 8 << 20
"""Read and written at a time."""
SWAPS = 10
"""Attempts to replace a file."""
REFUSED, NOT_IMPLEMENTED = (404, 409, 412), 501
"""Answers of S3 to a write with a precondition: it does not hold, another write is under way; no preconditions."""


@dataclass(frozen=True, order=True)
class ObjectFile:
    """A file of an object store, as it was listed."""

    address: str
    size: int = field(compare=False)
    modified_ns: int = field(compare=False)
    """Time of the last change in nanoseconds since 1970. Most stores round it to seconds."""

    @property
    def name(self) -> str:
        """Last part of the address."""
        return self.address.rpartition("/")[2]

    def __str__(self) -> str:
        return self.address


def is_address(text: str) -> bool:
    """Tells whether a text is an address and not a path on a local disk.

    Example:
        >>> is_address("s3://bucket/a.parquet"), is_address("/data/a.parquet")
        (True, False)
    """
    return _ADDRESS.match(text) is not None


def add_variables(properties: Mapping[str, str]) -> dict[str, str]:
    """Adds what the environment says of the store's address and region to properties that do not say it."""
    found = {name: os.environ[variable] for variable, name in _VARIABLES.items() if variable in os.environ}
    return found | dict(properties)


def send_lengths(properties: Mapping[str, str]) -> None:
    """Lets this process and its children write to a store that is not Amazon's as before 2025.

    Since then Amazon's library sends checksums behind the content and no length before it, which stores such as Ceph 16
    refuse. What the environment says already is kept. Call it before a store is opened.
    """
    if AMAZON not in add_variables(properties).get("s3.endpoint", AMAZON):
        os.environ.setdefault(CHECKSUMS, "when_required")


def find_objects(pattern: str, properties: Mapping[str, str]) -> list[ObjectFile]:
    """Lists the files at an address or a glob: `*`, `?` and `[]` stay within a folder, `**` does not.

    Args:
        properties: Access to the store in pyiceberg's names, such as `s3.endpoint`. What is missing comes from the
            environment, as with the store's own tools.
    Raises:
        StorageError: If the store is not known, not there, or refuses.
    """
    scheme, _, path = pattern.partition("://")
    store: Any = _open_store(pattern, properties)
    bucket, *parts = path.rstrip("/").split("/")
    try:  # fsspec's own glob takes a store that does not answer for an empty one
        found = list(_walk(store.fs, bucket, parts))
    except OSError as error:
        raise unreachable(f"address '{pattern}'", error) from error
    return sorted(ObjectFile(f"{scheme}://{info.path}", info.size, info.mtime_ns or 0) for info in found)


def _walk(store: "pa_fs.FileSystem", folder: str, parts: Sequence[str]) -> "Iterator[pa_fs.FileInfo]":
    """Yields the files below a folder that match the parts of a glob. Lists only folders that may have some."""
    from fsspec.utils import glob_translate
    from pyarrow import fs as pa_fs

    fixed = list(itertools.takewhile(lambda part: not _WILD.search(part), parts))
    folder, parts = "/".join([folder, *fixed]), parts[len(fixed) :]
    if not parts:
        info = store.get_file_info(folder)
        yield from [info] if info.type == pa_fs.FileType.File else []
        return
    deep = "**" in parts[0]
    part = re.compile(glob_translate("/".join(parts) if deep else parts[0]))
    for info in store.get_file_info(pa_fs.FileSelector(folder, recursive=deep, allow_not_found=True)):
        if not part.match(info.path.removeprefix(f"{folder}/")):
            continue
        if info.type == pa_fs.FileType.File and (deep or len(parts) == 1):
            yield info
        elif info.type == pa_fs.FileType.Directory and not deep and len(parts) > 1:
            yield from _walk(store, info.path, parts[1:])


def open_file(address: str, properties: Mapping[str, str]) -> "pa.NativeFile":
    """Opens a file of a store, or a local one, for reading at any place.

    Raises:
        OSError: If it is gone.
        StorageError: As `find_objects`.
    """
    import pyarrow as pa

    if not is_address(address):
        return pa.memory_map(address)
    store: Any = _open_store(address, properties)
    return store.fs.open_input_file(_path_in(address))


class ObjectFolder:
    """A folder of an object store, to write to.

    A file appears whole or not at all. Nothing else is atomic: write last what says that the rest is there.

    Args:
        address: Such as s3://bucket/trainings.
        properties: As in `find_objects`.
        copied: Called after each COPY_BYTES of a file that is copied.
    Raises:
        StorageError: Methods raise it if the store is not there, or refuses.
        OSError: If a disk of this host is full or broken.
    """

    def __init__(self, address: str, properties: Mapping[str, str], copied: Callable[[], None] = lambda: None) -> None:
        self.address, self.properties, self.copied = address.rstrip("/"), dict(properties), copied

    def child(self, name: str) -> "ObjectFolder":
        """Returns a folder below this one."""
        return ObjectFolder(f"{self.address}/{name}", self.properties, self.copied)

    def patient(self) -> "ObjectFolder":
        """Returns the same folder for long work: requests are repeated for about a minute if nobody answers."""
        return ObjectFolder(self.address, self.properties | {_RETRIES: f"{__name__}.retry_long"}, self.copied)

    def names(self) -> list[str]:
        """Lists all files below, each with its path from here."""
        from pyarrow import fs as pa_fs

        with self._asking() as (store, root):
            found = store.get_file_info(pa_fs.FileSelector(root, recursive=True, allow_not_found=True))
        return sorted(info.path.removeprefix(f"{root}/") for info in found if info.type == pa_fs.FileType.File)

    def read(self, name: str) -> bytes | None:
        """Returns the content of a small file. None: there is none.

        pyarrow asks for the length first. If the file is replaced before the bytes come, it returns a part of them, or
        more, of which the rest is rubbish. So boto3 asks where it can, and else the file is read until two reads agree.
        """
        client = _s3_client(self.address, self.properties)
        if client is not None:
            return _read_s3(client, f"{self.address}/{name}")[0]
        last: bytes | None = None
        with self._asking() as (store, root), suppress(FileNotFoundError):
            while True:
                with store.open_input_stream(f"{root}/{name}") as file:
                    content: bytes = file.read()
                if content == last:
                    return content
                last = content
        return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file, or replaces it."""
        with self._asking() as (store, root), store.open_output_stream(f"{root}/{name}") as file:
            file.write(content)

    def swap(self, name: str, before: bytes | None, content: bytes) -> bool:
        """Replaces a small file if it still has the content `before`; None: if there is none. Tells whether it did.

        With boto3, an S3 store does this in one step (If-Match, If-None-Match). In other stores, and in those that do
        not know these headers, another writer may come between the comparison and the write.

        Args:
            content: Unlike that of all other writers, so that a lost answer is not taken for a refusal.
        """
        client = _s3_client(self.address, self.properties)
        if client is None:
            unchanged = self.read(name) == before
            if unchanged:
                self.write(name, content)
            return unchanged
        return _swap_s3(client, f"{self.address}/{name}", before, content)

    def put(self, path: Path, name: str) -> None:
        """Copies a local file here."""
        self._copy(path, name, down=False)

    def fetch(self, name: str, path: Path) -> None:
        """Copies a file to a local path. Raises FileNotFoundError if there is none."""
        self._copy(path, name, down=True)

    def remove(self, name: str = "") -> None:
        """Removes a file, or a folder with all that is below: without a name, this one. It may be gone already."""
        from pyarrow import fs as pa_fs

        with suppress(FileNotFoundError), self._asking() as (store, root):  # another process may remove it, too
            info = store.get_file_info(f"{root}/{name}".rstrip("/"))
            if info.type == pa_fs.FileType.Directory:
                store.delete_dir(info.path)
            elif info.type == pa_fs.FileType.File:
                store.delete_file(info.path)

    def _copy(self, path: Path, name: str, down: bool) -> None:
        from pyarrow import fs as pa_fs

        with self._asking() as (store, root):
            here, there = (pa_fs.LocalFileSystem(), str(path)), (store, f"{root}/{name}")
            (source, start), (target, end) = (there, here) if down else (here, there)
            try:
                with source.open_input_stream(start) as file, target.open_output_stream(end) as out:
                    while content := file.read(COPY_BYTES):
                        out.write(content)
                        self.copied()
            except OSError as error:
                if error.errno in _OF_DISKS:  # in the words of the system, which name the file
                    raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
                raise

    @contextmanager
    def _asking(self) -> "Iterator[tuple[pa_fs.FileSystem, str]]":
        store: Any = _open_store(self.address, self.properties)
        try:
            yield store.fs, _path_in(self.address)
        except OSError as error:
            if isinstance(error, FileNotFoundError) or error.errno in _OF_DISKS:
                raise
            raise unreachable(f"address '{self.address}'", error) from error


def retry_long() -> "pa_fs.S3RetryStrategy":
    """Returns the retry strategy of `ObjectFolder.patient`."""
    from pyarrow import fs as pa_fs

    return pa_fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS)


def register_stores(
    connection: "duckdb.DuckDBPyConnection", addresses: Iterable[str], properties: Mapping[str, str]
) -> None:
    """Lets DuckDB read from the stores of some addresses. What it may read there is up to its `allowed_paths`."""
    first = {address.partition("://")[0]: address for address in sorted(addresses, reverse=True)}
    for address in first.values():
        connection.register_filesystem(_open_store(address, properties))


def store_failure(error: Exception) -> StorageError | None:
    """Returns what a store answered to DuckDB, whose error is then Python's traceback. None: it is another error."""
    text = str(error)
    found = _ANSWER.search(text) if text.startswith("Traceback") else None
    return None if found is None else unreachable("object store of the source", OSError(found[1]))


def _open_store(address: str, properties: Mapping[str, str]) -> "AbstractFileSystem":
    scheme, _, rest = address.partition("://")
    if scheme not in SCHEMES:
        raise StorageError(
            f"address '{address}'", f"a path, or an address that begins with one of {', '.join(SCHEMES)}",
            f"'{scheme}'", "Correct it.",
        )  # fmt: skip
    send_lengths(properties)
    try:
        return _store(scheme, rest.partition("/")[0], tuple(sorted(add_variables(properties).items())))
    except (OSError, ValueError) as error:
        raise unreachable(f"address '{address}'", error) from error


def _path_in(address: str) -> str:
    """Returns the bucket and key of an address, or of what is no address any more."""
    return _ADDRESS.sub("", address, count=1).rstrip("/")


@lru_cache(maxsize=32)
def _store(scheme: str, bucket: str, properties: tuple[tuple[str, str], ...]) -> "AbstractFileSystem":
    """Returns pyarrow's file system of a bucket with fsspec's methods, which DuckDB calls."""
    from fsspec.implementations.arrow import ArrowFSWrapper  # imported here: most commands read local files alone
    from pyiceberg.io.pyarrow import PyArrowFileIO

    class Store(ArrowFSWrapper):
        protocol = scheme
        cachable = False

        @classmethod
        def _strip_protocol(cls, path: Any) -> Any:
            if isinstance(path, list):
                return [cls._strip_protocol(one) for one in path]
            return _path_in(str(path))

    return Store(PyArrowFileIO(dict(properties)).fs_by_scheme(scheme, bucket))


def _s3_client(address: str, properties: Mapping[str, str]) -> Any:
    """Returns boto3's client, or None without boto3, for another store than S3, and for access by a role."""
    access = add_variables(properties)
    if not address.startswith(("s3://", "s3a://")) or access.keys() & {"s3.role-arn", "client.role-arn"}:
        return None
    send_lengths(properties)
    return _boto3_client(tuple(sorted(access.items())))


@lru_cache(maxsize=32)
def _boto3_client(properties: tuple[tuple[str, str], ...]) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        return None
    given = dict(properties)

    def find(name: str) -> str | None:
        return given.get(f"s3.{name}", given.get(f"client.{name}"))

    endpoint, proxy = given.get("s3.endpoint"), given.get("s3.proxy-uri")
    virtual = given.get("s3.force-virtual-addressing", "").lower() == "true"
    client = boto3.session.Session().client(
        "s3", endpoint_url=endpoint, region_name=find("region"), aws_access_key_id=find("access-key-id"),
        aws_secret_access_key=find("secret-access-key"), aws_session_token=find("session-token"),
        config=Config(
            proxies=None if proxy is None else {"http": proxy, "https": proxy},
            connect_timeout=float(given.get("s3.connect-timeout", 60)),
            read_timeout=float(given.get("s3.request-timeout", 60)),
            retries={"mode": "standard", "total_max_attempts": _BOTO3_ATTEMPTS if _RETRIES in given else 3},
            s3={"addressing_style": "virtual" if virtual else "auto" if endpoint is None else "path"},
        ),
    )  # fmt: skip
    known = client.meta.service_model.operation_model("PutObject").input_shape.members
    return client if "IfMatch" in known else None  # since 1.35.69


def _read_s3(client: Any, address: str) -> tuple[bytes | None, str]:
    """Returns the content of an object and its ETag, or None and an empty text if there is none."""
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, key = address.partition("://")[2].partition("/")
    try:
        answer = client.get_object(Bucket=bucket, Key=key)
        return answer["Body"].read(), answer["ETag"]
    except client.exceptions.NoSuchKey:
        return None, ""
    except (BotoCoreError, ClientError) as error:
        raise unreachable(f"address '{address}'", error) from error


def _swap_s3(client: Any, address: str, before: bytes | None, content: bytes) -> bool:
    """See `ObjectFolder.swap`."""
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, key = address.partition("://")[2].partition("/")
    try:
        for attempt in range(SWAPS):
            found, tag = _read_s3(client, address)
            if found != before:
                return found == content
            tag = tag if attempt % 2 == 0 else tag.strip('"')  # Ceph 16 wants no quotes
            condition = {"IfNoneMatch": "*"} if found is None else {"IfMatch": tag}
            try:
                client.put_object(Bucket=bucket, Key=key, Body=content, **condition)
                return True
            except ClientError as error:
                status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                if status == NOT_IMPLEMENTED:
                    client.put_object(Bucket=bucket, Key=key, Body=content)
                    return True
                if status not in REFUSED:
                    raise
    except (BotoCoreError, ClientError) as error:
        raise unreachable(f"address '{address}'", error) from error
    raise unreachable(f"address '{address}'", OSError(f"{SWAPS} refusals to replace a file that nobody has changed"))


def unreachable(where: str, error: Exception) -> StorageError:
    reason = str(error).split("\n")[0].rstrip(".")
    return StorageError(
        where, "a store that answers", reason,
        "Check the address, and the credentials: in the environment, or in warehouse.catalog such as s3.endpoint.",
    )  # fmt: skip
