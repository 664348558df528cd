"""A file is the old one or the new one, never a half-written one."""

import datetime
import errno
import hashlib
import json
import os
import stat
from pathlib import Path

import pytest
from pydantic import BaseModel

from storage import artifacts
from storage.artifacts import (
    atomic_file,
    inside,
    link_or_copy,
    read_note,
    read_values,
    seal_folder,
    sha256,
    write_json,
    write_text,
)
from storage.errors import StorageError


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def interrupted(path: Path) -> None:
    path.write_text("half")
    raise KeyboardInterrupt


def test_a_file_appears_complete_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.txt"
    with atomic_file(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
        assert temporary.parent == path.parent
    assert content(tmp_path) == {"deep/report.txt": "new"}


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    write_text(tmp_path / "report.txt", "old")
    with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / "report.txt") as temporary:
        interrupted(temporary)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "report.txt", {"loss": float("nan")})
    assert content(tmp_path) == {"report.txt": "old"}


def test_a_failed_rename_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "report.txt").mkdir()
    with pytest.raises(OSError):
        write_text(tmp_path / "report.txt", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["report.txt"]


def folder_of(path: Path, **texts: str) -> Path:
    path.mkdir()
    for name, text in texts.items():
        (path / name).write_text(text)
    return path


def test_a_folder_replaces_the_older_one_whole(tmp_path: Path) -> None:
    for number in ("1", "2"):
        seal_folder(folder_of(tmp_path / "new", **{f"shard_{number}": number}), tmp_path / "step")
    assert content(tmp_path) == {"step/shard_2": "2"}
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_a_power_failure_does_not_take_back_a_finished_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are synced before it gets its name, and its name before the caller goes on."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        done.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_rename(old: Path, new: Path) -> None:
        done.append(f"rename {Path(new).name}")
        replace(old, new)

    folder_of(tmp_path / "new", shard="1")
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    seal_folder(tmp_path / "new", tmp_path / "step")
    assert done == ["sync shard", "sync new", "rename step", f"sync {tmp_path.name}"]


def test_the_old_folder_is_never_seen_half_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seal_folder(folder_of(tmp_path / "new", shard="old"), tmp_path / "step")
    removed = artifacts.shutil.rmtree
    seen: list[dict[str, str]] = []

    def look(path: Path) -> None:
        seen.append(content(tmp_path / "step"))
        removed(path)

    monkeypatch.setattr(artifacts.shutil, "rmtree", look)
    seal_folder(folder_of(tmp_path / "new", shard="new"), tmp_path / "step")
    assert seen == [{"shard": "new"}]  # the new folder has its name before the old one is deleted
    assert content(tmp_path) == {"step/shard": "new"}


@pytest.mark.parametrize(("mask", "file_mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_permissions_follow_the_umask(tmp_path: Path, mask: int, file_mode: int) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "report.txt", "new")
        for text in ("old", "new"):
            seal_folder(folder_of(tmp_path / "temporary", shard=text), tmp_path / "step")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"report.txt": file_mode, "step": 0o777 & ~mask, "shard": file_mode}


def test_json_is_sorted_and_readable(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1, "a": datetime.date(2024, 1, 2)})
    assert (tmp_path / "a.json").read_text() == '{\n  "a": "2024-01-02",\n  "b": 1\n}\n'
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": "2024-01-02", "b": 1}


def test_sha256_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 300_000)
    assert sha256(tmp_path / "a") == hashlib.sha256(b"x" * 300_000).hexdigest()


@pytest.mark.parametrize("links", [True, False])
def test_a_file_gets_a_second_name_or_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if not links:
        monkeypatch.setattr("storage.artifacts.os.link", refuse)
    (tmp_path / "a").write_bytes(b"weights")
    link_or_copy(tmp_path / "a", tmp_path / "new" / "b")
    assert (tmp_path / "new" / "b").read_bytes() == b"weights"
    assert (tmp_path / "new" / "b").samefile(tmp_path / "a") == links
    (tmp_path / "a").unlink()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["b"]


def test_a_secret_file_is_one_before_it_has_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes, write = [], Path.write_text

    def watched(path: Path, *args: str, **kwargs: str) -> int:
        modes.append(stat.S_IMODE(path.stat().st_mode))
        return write(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", watched)
    write_text(tmp_path / "spec.json", "password", mode=0o600)
    assert (modes, stat.S_IMODE((tmp_path / "spec.json").stat().st_mode)) == ([0o600], 0o600)


NAMES = ("", ".", "..", "../a", "a/../../b", "/etc/passwd", "a/b", "a\\b", "a\0b")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageError, match="expected one below"):
        inside(tmp_path, name)


def test_a_name_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert inside(tmp_path, "real") == tmp_path / "real"
    assert inside(tmp_path, "new") == tmp_path / "new"
    with pytest.raises(StorageError, match="name 'link'"):
        inside(tmp_path, "link")


class Note(BaseModel):
    rows: int


@pytest.mark.parametrize(
    ("content", "found"),
    [(None, "no file"), (b"", "other content"), (b"\xff", "other content"), (b"[" * 10_000, "other content"), (b'{"rows": "x"}', "other content at 'rows'")],
)  # fmt: skip
def test_a_damaged_note_is_one_sentence(tmp_path: Path, content: bytes | None, found: str) -> None:
    path = tmp_path / "note.json"
    if content is not None:
        path.write_bytes(content)
    for read in (read_note, read_values):
        with pytest.raises(StorageError) as caught:
            read(path, Note)
        assert f"{caught.value}" == (
            f"file '{path}': expected what an earlier command wrote, got {found}. "
            f"Restore it from a copy, or remove '{tmp_path}' and run the command again."
        )


def test_a_note_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_json(tmp_path / "note.json", {"rows": 3, "more": [0.1, 1e-300]})
    assert read_note(tmp_path / "note.json", Note) == Note(rows=3)
    assert read_values(tmp_path / "note.json", Note) == {"rows": 3, "more": [0.1, 1e-300]}
