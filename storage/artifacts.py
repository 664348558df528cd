"""Atomic writes: a reader sees the old file or the new one, never a partial one."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar
from uuid import uuid4

from pydantic import AfterValidator, BaseModel, TypeAdapter, ValidationError

from storage.errors import StorageError

T = TypeVar("T")
MADE_AGAIN = "Remove it and run the command again, which makes it anew."
"""Remedy for a damaged file that costs only time."""


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path next to `path`. Renames it to `path` on success and removes it on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    temporary.touch(exist_ok=False)  # default permissions: mkstemp's would lock out other users
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, mode: int | None = None) -> None:
    """Replaces the content of a file atomically.

    Args:
        mode: Permissions such as 0o600, set before anything is written. None: the default ones.
    """
    with atomic_file(path) as temporary:
        if mode is not None:
            temporary.chmod(mode)
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON. Keys are sorted: equal values give equal files."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False, default=str) + "\n")


def read_note(path: Path, kind: type[T], remedy: str | None = None) -> T:
    """Reads a JSON file that an earlier command wrote with one of the functions above.

    Args:
        kind: What it holds: a model, or another type that pydantic knows.
        remedy: What to do about a damaged file. None: as for the files of a run.
    Raises:
        StorageError: If it is missing or holds something else.
    """
    return _read(path, TypeAdapter(kind).validate_json, remedy)


def write_checked(path: Path, text: str) -> None:
    """Replaces a file by its checksum and JSON text, for numbers in which nobody would see a wrong digit."""
    write_text(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def read_checked(path: Path, kind: type[T], remedy: str | None = None) -> T:
    """Reads a file that `write_checked` wrote, as `read_note` does.

    Raises:
        StorageError: If it is missing or holds something else.
    """

    def parse(content: bytes) -> T:
        checksum, _, text = content.partition(b"\n")
        intact = checksum == hashlib.sha256(text).hexdigest().encode()
        return TypeAdapter(kind).validate_json(text if intact else b"")

    return _read(path, parse, remedy)


def read_values(path: Path, kind: type[BaseModel], remedy: str | None = None) -> dict[str, Any]:
    """Reads a file like `read_note`, and returns all that it holds, not only the fields of the model."""

    def parse(content: bytes) -> dict[str, Any]:
        return TypeAdapter(Annotated[dict[str, Any], holding(kind)]).validate_json(content)

    return _read(path, parse, remedy)


def _read(path: Path, parse: Callable[[bytes], T], remedy: str | None) -> T:
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        actual = "no file"
    except ValidationError as error:
        actual = "other content" + _place(error)
    remedy = remedy or f"Restore it from a copy, or remove '{path.parent}' and run the command again."
    raise StorageError(f"file '{path}'", "what an earlier command wrote", actual, remedy) from None


def read_line(path: Path) -> str:
    """Returns the one line of a text file that an earlier command wrote. Bytes that are no text become signs for it."""
    return path.read_text(encoding="utf-8", errors="replace").strip()


def _place(error: ValidationError) -> str:
    key = ".".join(map(str, error.errors()[0]["loc"]))
    return f" at '{key[:200]}'" if key else ""


def holding(kind: type[BaseModel]) -> AfterValidator:
    """Makes pydantic check that a mapping has the fields of a model. The mapping stays as it is.

    Example:
        >>> class Size(BaseModel):
        ...     rows: int
        >>> TypeAdapter(Annotated[dict[str, Any], holding(Size)]).validate_python({"rows": 3, "text": "x"})
        {'rows': 3, 'text': 'x'}
    """

    def check(values: Any) -> Any:
        kind.model_validate_json(json.dumps(values), strict=True)  # nothing is converted, so it must be right already
        return values

    return AfterValidator(check)


def link_or_copy(source: Path, target: Path) -> None:
    """Gives a file that nobody changes a second name, or copies it where that cannot be, as on another filesystem.

    Args:
        target: Must not exist.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        with atomic_file(target) as temporary:
            shutil.copyfile(source, temporary)


def inside(root: Path, name: str) -> Path:
    """Returns the path of an untrusted name directly below a root.

    Raises:
        StorageError: If the name leads anywhere else, through its parts or a link.
    Example:
        >>> inside(Path("runs"), "../secrets")
        Traceback (most recent call last):
        storage.errors.StorageError: name '../secrets': expected one below 'runs', got another place. Do not trust it.
    """
    path = root / name
    is_plain = name not in ("", ".", "..") and "/" not in name and "\\" not in name and "\0" not in name
    if not is_plain or path.is_symlink():
        raise StorageError(f"name '{name}'", f"one below '{root}'", "another place", "Do not trust it.")
    return path


def seal_folder(temporary: Path, path: Path) -> None:
    """Moves a finished folder to its final name. An older folder there is replaced and never seen half deleted.

    After that, a power failure does not take it back.
    """
    for file in temporary.rglob("*"):
        if file.is_file():
            _sync(file)
    _sync(temporary)
    older = _temporary_name(path) if path.exists() else None
    if older is not None:
        path.replace(older)
    temporary.replace(path)
    _sync(path.parent)
    if older is not None:
        shutil.rmtree(older)


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with all that is below. It may be gone already."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def hash_contents(files: Iterable[tuple[Path, bytes]]) -> str:
    """Returns the SHA-256 of files, names and contents, in the order of the names."""
    digest = hashlib.sha256()
    for name, content in sorted(files):
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's content in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _temporary_name(path: Path) -> Path:
    """Returns an unused name in the same folder."""
    return path.with_name(f".{path.name}.{uuid4().hex}.tmp")


def _sync(path: Path) -> None:
    """Waits until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
