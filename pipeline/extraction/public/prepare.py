"""Makes Parquet files of a public data set: download, checksums, conversion."""

import gzip
import hashlib
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import duckdb

from pipeline.data.formats.reading import first_line
from pipeline.errors import ConfigError, DataError
from pipeline.extraction.public.sets import SETS, Member, PublicSet
from storage.query import connect, literal
from storage.scratch import ScratchFolder

CHUNK = 1 << 22
RANGE_NOT_SATISFIABLE = 416
SECONDS_OF_SILENCE = 60.0
"""A server that sends nothing for so long has failed."""
Report = Callable[[str, int, int], None]
"""Takes what is done, and bytes that are done and in total."""


def find_set(name: str) -> PublicSet:
    """Returns a set by its name.

    Raises:
        ConfigError: If there is none of that name.
    """
    if name not in SETS:
        raise ConfigError("dataset", f"one of {', '.join(SETS)}", f"'{name}'", "`dlrm dataset` lists them.")
    return SETS[name]


def prepare(one: PublicSet, folder: Path, given: Path | None, report: Report) -> dict[str, int]:
    """Writes the tables of a set, each as a whole, after all content has been checked. Replaces those that are there.

    Args:
        folder: Where to write. Also takes the unpacked files meanwhile, and the rest of a download that was cut off.
        given: The archive, or a folder with its files, if somebody has fetched it. None downloads the archive.
        report: Called as the bytes come and are read.
    Returns:
        Table, or part of the split -> number of rows.
    Raises:
        DataError: If the archive cannot be fetched, lacks a file or has other content than the publisher's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    archive = given or fetch(one.address, folder / Path(one.address).name, report)
    try:
        with ScratchFolder("unpacked-", folder) as scratch:
            files = unpack(one, archive, Path(scratch), report)
            counts = convert(one, files, Path(scratch))
            for name in one.tables:
                (Path(scratch) / f"{name}.parquet").replace(folder / f"{name}.parquet")
    except DataError:
        if given is None:  # the next attempt fetches it anew
            archive.unlink()
        raise
    if given is None:
        archive.unlink()
    return counts


def fetch(address: str, target: Path, report: Report) -> Path:
    """Downloads a file. Goes on where an earlier attempt ended, if the server can.

    Raises:
        DataError: If the server cannot be reached, refuses, or sends less than it said.
    """
    if target.exists():
        return target
    part = target.with_name(f"{target.name}.part")
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    remedy = f"Run it again, or fetch it with a browser and give path={target.name}."
    try:
        with urllib.request.urlopen(request, timeout=SECONDS_OF_SILENCE) as answer:
            goes_on = answer.status == 206
            have = have if goes_on else 0
            total = have + int(answer.headers.get("Content-Length", 0))
            with part.open("ab" if goes_on else "wb") as file:
                while chunk := answer.read(CHUNK):
                    file.write(chunk)
                    have += len(chunk)
                    report("download", have, max(have, total))
    except urllib.error.HTTPError as error:
        if error.code == RANGE_NOT_SATISFIABLE and have:  # nothing is left to send, or the archive is another by now
            part.unlink()
            return fetch(address, target, report)
        raise DataError(address, "the archive", f"{error}", remedy) from error
    except (OSError, ValueError) as error:
        raise DataError(address, "the archive", f"{error}", remedy) from error
    if have < total:
        raise DataError(address, f"{total:,} bytes", f"{have:,}, then the connection ended", remedy)
    return part.replace(target)


def unpack(one: PublicSet, source: Path, scratch: Path, report: Report) -> dict[str, Path]:
    """Returns member -> its file, unpacked where needed. Holds all against their checksums.

    Raises:
        DataError: If a file is missing, damaged or another.
    """
    if source.is_dir():
        files = {name: _find(source, member) for name, member in one.members.items()}
        for name, member in one.members.items():
            if member.md5 is not None:
                with _opened(files[name]) as stream:
                    found = _copy(stream, None, member.path, files[name].stat().st_size, report)
                _check(f"'{files[name]}'", found, member.md5)
        return files
    if one.md5 is not None:
        with _opened(source) as stream:
            _check(source.name, _copy(stream, None, source.name, source.stat().st_size, report), one.md5)
    files = {}
    with _members(source) as open_member:
        for name, member in one.members.items():
            content, size = open_member(member.path)
            files[name] = scratch / Path(member.path).name
            with content, files[name].open("wb") as target:
                found = _copy(content, target, member.path, size, report)
            if member.md5 is not None:
                _check(f"{member.path} of {source.name}", found, member.md5)
    return files


def convert(one: PublicSet, files: Mapping[str, Path], scratch: Path) -> dict[str, int]:
    """Writes the tables into the scratch folder. Returns table, or part of the split -> number of rows.

    Raises:
        DataError: If a file is not in the form it should have, or rows are missing.
    """
    counts: dict[str, int] = {}
    with connect([*files.values(), scratch], scratch / "spill") as connection:
        for name, select in one.tables.items():
            for member, path in files.items():
                options = one.members[member].options
                rows = f"read_csv({literal(path)}, all_varchar=true, {options})"
                select = select.replace(f"{{{member}}}", rows)
            target = literal(scratch / f"{name}.parquet")
            try:
                connection.execute(f"COPY ({select}) TO {target} (FORMAT parquet, COMPRESSION zstd)")
                described = connection.execute(f"DESCRIBE SELECT * FROM {target}").fetchall()
                part = "split" if "split" in {row[0] for row in described} else f"'{name}'"
                found = connection.execute(f"SELECT {part}, count(*) FROM {target} GROUP BY 1").fetchall()
            except duckdb.Error as error:
                raise DataError(
                    f"files of {one.title}", "the publisher's form", first_line(error), "Fetch them again."
                ) from error
            counts |= {str(key): int(number) for key, number in found}
    for key, expected in one.rows.items():
        if (number := counts.get(key, 0)) != expected:
            raise DataError(f"rows of part '{key}'", f"{expected:,}", f"{number:,}", "Fetch the archive again.")
    return counts


def _find(folder: Path, member: Member) -> Path:
    """Finds a member in a folder, with or without the folders that the archive has it in."""
    parts = Path(member.path).parts
    for start in range(len(parts)):
        path = folder.joinpath(*parts[start:])
        if path.is_file():
            return path
    raise DataError(f"'{folder}'", f"the file {parts[-1]}", "none", "Unpack the archive there, or give the archive.")


@contextmanager
def _members(archive: Path) -> Iterator[Callable[[str], tuple[IO[bytes], int]]]:
    """Opens a zip or tar archive. Gives a function from a member's path to its content and size."""
    with ExitStack() as stack:
        try:
            if zipfile.is_zipfile(archive):
                packed = stack.enter_context(zipfile.ZipFile(archive))
                yield lambda path: (packed.open(path), packed.getinfo(path).file_size)
            else:
                stack.enter_context(_opened(archive))  # says if it cannot be read
                tar = stack.enter_context(tarfile.open(archive))
                yield lambda path: _of_tar(tar, path)
        except (KeyError, zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise DataError(
                f"'{archive}'", "a whole zip or tar archive with all files", f"{error}", "Fetch it again."
            ) from error


def _of_tar(tar: tarfile.TarFile, path: str) -> tuple[IO[bytes], int]:
    stream = tar.extractfile(path)
    if stream is None:
        raise KeyError(f"'{path}' is no file")
    return stream, tar.getmember(path).size


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("rb") as stream:
            yield stream
    except OSError as error:
        raise DataError(f"'{path}'", "a file that can be read", f"{error.strerror}", "Correct path=.") from error


def _copy(source: IO[bytes], target: IO[bytes] | None, what: str, total: int, report: Report) -> str:
    """Reads a stream to its end, into a file if one is given. Returns its MD5."""
    digest, done = hashlib.md5(usedforsecurity=False), 0
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        done += len(chunk)
        report(what, done, total)
    return digest.hexdigest()


def _check(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise DataError(what, f"MD5 {expected}", found, "It is damaged, or another version. Fetch it again.")
