"""One command's open resources: config, warehouse, tracking, folders, locks and console."""

import itertools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from pipeline.config import RunConfig
from pipeline.config.files import ROOT
from pipeline.errors import ConfigError
from pipeline.jobs.console import Console, one_line
from storage.artifacts import remove, write_text

if TYPE_CHECKING:
    import pyarrow as pa

    from pipeline.data.joined.source import PinnedSource
    from pipeline.registration.tracking import Tracker
    from storage.objects import ObjectFolder
    from storage.reader import SnapshotRef
    from storage.warehouse import Warehouse


class Workspace:
    """Open resources of a command, opened once and handed down.

    Warehouse and tracking, and the libraries behind them, are loaded on first use: many commands need only one.

    Args:
        config: The command's config.
        console: Receives logs, progress and pages. None: Python's logging.
    """

    def __init__(self, config: RunConfig, console: Console | None = None) -> None:
        self.config = config
        self.console = console or Console()

    @cached_property
    def warehouse(self) -> "Warehouse":
        """The warehouse below `home`, or that of the catalog in the config."""
        from storage.warehouse import Warehouse

        return Warehouse(self.config.tables, self.home / "warehouse")

    @cached_property
    def tracking(self) -> "Tracker":
        """The MLflow server or folder of this command."""
        from pipeline.registration.tracking import Tracker

        return Tracker(self.config.registration, self.home, self.config.name)

    @property
    def home(self) -> Path:
        """The resolved folder that the command writes to."""
        return self.config.home_path

    def with_config(self, config: RunConfig) -> "Workspace":
        """Returns a workspace with another config and the same console. It shares open resources that are the same."""
        other = Workspace(config, self.console)
        same_home = config.home_path == self.home
        if "warehouse" in self.__dict__ and same_home and config.tables == self.config.tables:
            other.warehouse = self.warehouse
        same_names = (config.name, config.registration) == (self.config.name, self.config.registration)
        if "tracking" in self.__dict__ and same_home and same_names:
            other.tracking = self.tracking
        return other

    def feature_joins(self) -> "tuple[PinnedSource, ...]":
        """Pins the feature sources that are joined while rows are read."""
        from pipeline.data.joined.source import pin_sources

        sources = [source for source in self.config.features.sources if not source.stored]
        return pin_sources(sources, ROOT, self.warehouse)

    def columns(self, snapshot: "SnapshotRef", wanted: Iterable[str] = ()) -> "pa.Schema":
        """Returns the columns that a training can name: those of the table and of joined feature sources.

        Args:
            wanted: Columns that may be keys of the table's maps.
        """
        from pipeline.data.joined.reader import joined_schema

        return joined_schema(self.warehouse, snapshot, self.feature_joins(), wanted)

    def stored(self, path: Path) -> "ObjectFolder | None":
        """Returns where `storage.path` has the folder of a training, or what is in it. None: it has not.

        Trials, replays and backtests are not continued by other machines, so they stay below `home`.
        """
        if self.config.storage.path is None or path.relative_to(self.home).parts[0] != "runs":
            return None
        from storage.objects import ObjectFolder

        everything = ObjectFolder(self.config.storage.path, self.config.warehouse.catalog)
        return everything.child(path.relative_to(self.home).as_posix())

    def remove(self, path: Path) -> None:
        """Removes a file or folder of `home`, here and from `storage.path`. It may be gone already."""
        remove(path)
        store = self.stored(path)
        if store is not None:
            store.remove()

    def unfinished_folder(self, kind: str, name: str, done: str) -> Path:
        """Returns the first of `name-0`, `name-1`, ... below `home`/kind without the file `done`.

        Interrupted work is found again, with `storage.path` also that of another machine. A finished folder is not
        touched.
        """
        folders = (self.home / kind / f"{name}-{attempt}" for attempt in itertools.count())
        return next(folder for folder in folders if not self.fetch_note(folder / done))

    def fetch_note(self, path: Path) -> bool:
        """Tells whether a small file is here. If another machine wrote it, it is copied from `storage.path` first."""
        store = self.stored(path.parent)
        if path.exists() or store is None:
            return path.exists()
        content = store.read(path.name)
        if content is not None:
            write_text(path, content.decode(errors="replace"))
        return content is not None

    def share_note(self, path: Path) -> None:
        """Copies a small file to `storage.path`, for other machines."""
        store = self.stored(path.parent)
        if store is not None:
            store.put(path, path.name)

    def latest_folder(self, kind: str, name: str, done: str, force: bool) -> Path:
        """Returns the last of `name-0`, `name-1`, ... below `home`/kind that exists, else the first.

        Args:
            done: File that a finished folder holds.
            force: Returns a new folder if the last one is finished.
        """
        folders = (self.home / kind / f"{name}-{attempt}" for attempt in itertools.count())
        made = list(itertools.takewhile(Path.exists, folders))
        if not made or (force and (made[-1] / done).exists()):
            return self.home / kind / f"{name}-{len(made)}"
        return made[-1]

    @contextmanager
    def lock(self, work: str) -> Iterator[None]:
        """Waits until no other process does the same work in this `home`, or on the same catalog.

        Two trainings of a model at once would share the processors and be compared with the same champion. Two ingests
        of a table would write its days twice. The lock is the kernel's: it ends with its process. If the catalog is in
        Postgres, a lock there does the same for all machines that share it.

        Args:
            work: Such as "training of model 'demo'".
        """
        folder = self.home / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{re.sub('[^A-Za-z0-9_]+', '-', work).strip('-')}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self.console.log.info("waiting: another %s is running; this one starts when it ends", work)
            lock.acquire(poll_interval=0.5)
        try:
            with self._database_lock(work):
                yield
        finally:
            lock.release()

    @contextmanager
    def _database_lock(self, work: str) -> Iterator[None]:
        engine = getattr(self.warehouse.catalog, "engine", None) if self.config.warehouse.catalog else None
        if engine is None or engine.dialect.name != "postgresql":  # Iceberg's check at each commit remains
            yield
            return
        from pipeline.jobs.database_lock import database_lock

        def wait(holder: str) -> None:
            self.console.log.info("waiting: another %s is running, %s; this one starts when it ends", work, holder)

        with database_lock(engine, f"{self.config.warehouse.namespace}: {work}", wait):
            yield

    @contextmanager
    def best_effort(self, what: str) -> Iterator[None]:
        """On failure, logs a warning and continues. An unreachable MLflow server still raises.

        Args:
            what: What is tried, such as "figures".
        """
        try:
            yield
        except Exception as error:
            from pipeline.registration.tracking import is_unreachable

            if is_unreachable(error):  # the run can be finished later
                raise
            self.console.log.warning("%s failed: %s", what, one_line(error))

    @property
    def training_lock(self) -> str:
        """Name of the lock that the trainings of the model share."""
        return f"training of model '{self.config.model_name}'"

    @property
    def ingest_lock(self) -> str:
        """Name of the lock that all writers of the table share."""
        return self.lock_of(self.config.name)

    def lock_of(self, table: str) -> str:
        """Name of the lock that all writers of a table share."""
        return f"ingest of table '{table}'"


@contextmanager
def exclusive_dir(folder: Path) -> Iterator[Path]:
    """Makes a folder and locks it for this process.

    Raises:
        ConfigError: If another process has locked it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        problem = f"run folder '{folder.name}' is in use by another process"
        raise ConfigError.of(problem, "Wait for it or stop it.") from None
    try:
        yield folder
    finally:
        lock.release()
