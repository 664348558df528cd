"""A simulated disk: real files in memory, and faults at each write, rename, deletion and sync that Python makes.

A killed process leaves what it has handed to the kernel. A power failure also takes what was not synced: contents of
files are cut or become zeros. Names of files change in order, as journaling filesystems like ext4 and XFS keep it: the
last changes before the failure may be lost, but those before a sync are not.
"""

import builtins
import errno
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.simulation.world import World

KILLED, POWER, FULL, ERROR = "the process is killed", "the power fails", "the disk is full", "the disk has an error"
FAULTS = (KILLED, POWER, FULL, ERROR)
BUFFER_BYTES = 1 << 16


class Killed(BaseException):
    """The process is dead. Nothing that it still tries has an effect."""


class Disk:
    """The files below a folder.

    Attributes:
        dead: Whether the process was killed. `restart` begins another.
        life: Number of the process.
        steps: Number of changes so far.
    """

    def __init__(self, world: World, root: Path) -> None:
        self.world, self.root = world, root.resolve()
        self.graves = self.root.parent / f"{self.root.name}.graves"
        self.root.mkdir(parents=True)
        self.graves.mkdir()
        self.dead, self.quiet = False, False
        self.life = self.steps = self.buried = self.full = 0
        self.unsynced: dict[int, bytes] = {}
        """Inode -> the content that a power failure leaves at least."""
        self.names: list[Callable[[], None]] = []
        """How to take back each change of a name since the last sync."""
        self.stamp: Callable[[], float] | None = None
        """The time that files get. None: the real one."""

    # -- faults -------------------------------------------------------------------------------------------------------

    def strike(self, kind: str, path: str) -> None:
        """Lets a fault happen before a change.

        Raises:
            Killed: If the process is dead, or dies now.
            OSError: If the disk is full or has an error.
        """
        if self.dead:
            raise Killed
        if self.quiet:
            return
        self.steps += 1
        for fault in (KILLED, POWER):
            if self.world.strikes(fault):
                self.world.note(f"at {kind} of {self.name(path)}")
                self.die(fault == POWER)
                raise Killed
        if kind in ("write", "create", "mkdir"):
            if self.world.strikes(FULL):
                self.full = self.world.random.randint(1, 12)
            if self.full:
                self.full -= 1
                self.world.note(f"no space at {kind} of {self.name(path)}")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if kind not in ("delete", "request") and self.world.strikes(ERROR):
            self.world.note(f"error at {kind} of {self.name(path)}")
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def die(self, power: bool) -> None:
        """Ends the process.

        Args:
            power: Takes what was not synced, too.
        """
        self.dead = True
        if power:
            self.lose()

    def lose(self) -> None:
        """Takes back the last changes of names, and cuts files that were not synced."""
        kept = self.world.random.randint(0, len(self.names))
        for undo in reversed(self.names[kept:]):
            undo()
        for path in sorted(self.root.rglob("*")):
            status = path.lstat()
            before = self.unsynced.get(status.st_ino)
            if stat.S_ISREG(status.st_mode) and before is not None:
                self._cut(path, before)
        self.unsynced.clear()
        self.names.clear()

    def _cut(self, path: Path, before: bytes) -> None:
        draw = self.world.random
        now = _read(path)
        size = draw.randint(min(len(before), len(now)), len(now))
        choice = draw.choice(["now", "before", "cut", "zeros"])
        content = {"now": now, "before": before, "cut": now[:size], "zeros": now[:size] + bytes(len(now) - size)}[
            choice
        ]
        with _OPEN(path, "wb") as file:
            file.write(content)
        self.world.note(f"lost: {self.name(str(path))} is as {choice}, {len(content)} of {len(now)} bytes")

    def restart(self) -> None:
        """Begins another process."""
        self.dead, self.full = False, 0
        self.life += 1

    def rot(self, path: Path) -> None:
        """Changes a byte of a file, as a failing disk does."""
        content = bytearray(_read(path))
        if content:
            content[self.world.random.randrange(len(content))] ^= 1 << self.world.random.randrange(8)
            with _OPEN(path, "rb+") as file:
                file.write(content)

    def name(self, path: str) -> str:
        """Returns the path below the root without random parts."""
        parts = Path(path).relative_to(self.root).parts
        return "/".join(part if len(part) < 32 else f"{part[:4]}..{Path(part).suffix}" for part in parts)

    @contextmanager
    def calm(self) -> Iterator[None]:
        """No faults in the block."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    # -- changes ------------------------------------------------------------------------------------------------------

    def holds(self, path: Any) -> bool:
        """Whether a path is on this disk."""
        if isinstance(path, int) or not isinstance(path, str | os.PathLike):
            return False
        return os.path.abspath(path).startswith(f"{self.root}/")

    def created(self, path: str) -> None:
        """Notes a new name. A failure takes it back."""

        def undo() -> None:
            if os.path.isdir(path):
                _RMDIR(path)
            elif os.path.lexists(path):
                _UNLINK(path)

        self.names.append(undo)
        if os.path.isfile(path):
            self.unsynced.setdefault(os.stat(path).st_ino, b"")

    def bury(self, path: str) -> str:
        """Keeps the content of a name that goes, in case it comes back. Returns where."""
        self.buried += 1
        grave = f"{self.graves}/{self.buried}"
        os.link(path, grave)
        return grave

    def replace(self, old: Any, new: Any, **kwargs: Any) -> None:
        if not self.holds(old):
            return _REPLACE(old, new, **kwargs)
        old, new = os.path.abspath(old), os.path.abspath(new)
        self.strike("rename", new)
        grave = self.bury(new) if os.path.isfile(new) else None
        _REPLACE(old, new)

        def undo() -> None:
            _REPLACE(new, old)
            if grave is not None:
                os.link(grave, new)

        self.names.append(undo)
        self.after("rename", new)
        return None

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None or not self.holds(path):
            return _UNLINK(path, dir_fd=dir_fd)
        path = os.path.abspath(path)
        self.strike("delete", path)
        grave = self.bury(path) if os.path.isfile(path) else None
        _UNLINK(path)
        if grave is not None:
            self.names.append(lambda: os.link(grave, path))
        return None

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None or not self.holds(path):
            return _MKDIR(path, mode, dir_fd=dir_fd)
        path = os.path.abspath(path)
        if not os.path.exists(path):
            self.strike("mkdir", path)
        _MKDIR(path, mode)
        self.created(path)
        return None

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None or not self.holds(path):
            return _RMDIR(path, dir_fd=dir_fd)
        path = os.path.abspath(path)
        self.strike("delete", path)
        _RMDIR(path)
        self.names.append(lambda: _MKDIR(path))
        return None

    def fsync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not self.holds(path):
            return _FSYNC(descriptor)
        self.strike("sync", path)
        self.unsynced.pop(os.fstat(descriptor).st_ino, None)
        self.sync_names()
        return None

    def sync_names(self) -> None:
        """Makes all changes of names so far last."""
        self.names.clear()

    def truncate(self, path: Any, length: int) -> None:
        if self.holds(path):
            self.strike("write", os.path.abspath(path))
            self.changed(os.path.abspath(path))
        _TRUNCATE(path, length)

    def os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fresh = self.holds(path) and flags & os.O_CREAT and not os.path.exists(path)
        if fresh:
            self.strike("create", os.path.abspath(path))
        descriptor = _OS_OPEN(path, flags, mode, dir_fd=dir_fd)
        if fresh:
            self.created(os.path.abspath(path))
        return descriptor

    def changed(self, path: str) -> None:
        """Notes that a file is about to change."""
        if os.path.exists(path):
            number = os.stat(path).st_ino
            if number not in self.unsynced:
                self.unsynced[number] = _read(Path(path))

    def open(self, path: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wax+") or not self.holds(path):
            return _OPEN(path, mode, buffering, *args, **kwargs)
        path = os.path.abspath(path)
        if not os.path.exists(path) and not set(mode) & set("wax"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        fresh = not os.path.exists(path)
        self.strike("create" if fresh else "write", path)
        self.changed(path)
        raw = _OPEN(path, mode.replace("b", "").replace("t", "") + "b", 0)
        if fresh:
            self.created(path)
        if "+" in mode:
            return raw if "b" in mode else io.TextIOWrapper(io.BufferedRandom(raw), *args, **kwargs)
        binary = SimulatedFile(self, path, raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, *args, **kwargs)

    def rmtree(self, path: Any, ignore_errors: bool = False, **kwargs: Any) -> None:
        if not self.holds(path):
            return _RMTREE(path, ignore_errors, **kwargs)
        try:
            for name in sorted(os.listdir(path)):
                below = os.path.join(path, name)
                if os.path.isdir(below) and not os.path.islink(below):
                    self.rmtree(below, ignore_errors)
                else:
                    self.unlink(below)
            self.rmdir(path)
        except OSError:
            if not ignore_errors:
                raise
        return None

    def after(self, kind: str, path: str) -> None:
        """A process may also die after a change."""
        if not self.quiet and self.world.strikes(KILLED):
            self.world.note(f"after {kind} of {self.name(path)}")
            self.die(False)
            raise Killed

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Python's changes of files below the root pass through this disk."""
        patches: list[tuple[Any, str, Any]] = [
            (builtins, "open", self.open), (io, "open", self.open), (os, "open", self.os_open),
            (os, "replace", self.replace), (os, "rename", self.replace), (os, "unlink", self.unlink),
            (os, "remove", self.unlink), (os, "mkdir", self.mkdir), (os, "rmdir", self.rmdir), (os, "fsync", self.fsync),
            (os, "truncate", self.truncate), (shutil, "rmtree", self.rmtree),
        ]  # fmt: skip
        with ExitStack() as stack:
            for owner, name, own in patches:
                stack.enter_context(patch.object(owner, name, own))
            yield


class SimulatedFile(io.BufferedIOBase):
    """A file that is being written. What it has not flushed dies with its process."""

    def __init__(self, disk: Disk, path: str, raw: Any) -> None:
        self.disk, self.path, self.raw_file, self.life = disk, path, raw, disk.life
        self.buffer = bytearray()
        self.position = raw.seek(0, os.SEEK_END)

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self.position

    def fileno(self) -> int:
        return int(self.raw_file.fileno())

    def write(self, data: Any) -> int:
        if self.disk.dead or self.disk.life != self.life:
            raise Killed
        view = bytes(memoryview(data).cast("B"))
        self.buffer += view
        self.position += len(view)
        if len(self.buffer) >= BUFFER_BYTES:
            self.flush()
        return len(view)

    def flush(self) -> None:
        if self.closed or not self.buffer or self.disk.life != self.life:
            return
        data, self.buffer = bytes(self.buffer), bytearray()
        try:
            self.disk.strike("write", self.path)
        except BaseException:  # some of it may have been written
            if not self.disk.dead or self.disk.world.random.random() < 0.5:
                self.raw_file.write(data[: self.disk.world.random.randint(0, len(data))])
            raise
        self.raw_file.write(data)

    def close(self) -> None:
        if self.closed:
            return
        try:
            if not self.disk.dead:
                self.flush()
        finally:
            self.raw_file.close()
            if self.disk.stamp is not None and not self.disk.dead:
                os.utime(self.path, (self.disk.stamp(), self.disk.stamp()))
            self.buffer = bytearray()
            super().close()


def _read(path: Path) -> bytes:
    with _OPEN(path, "rb") as file:
        return bytes(file.read())


_OPEN, _OS_OPEN, _FSYNC, _TRUNCATE = builtins.open, os.open, os.fsync, os.truncate
_REPLACE, _UNLINK, _MKDIR, _RMDIR, _RMTREE = os.replace, os.unlink, os.mkdir, os.rmdir, shutil.rmtree
