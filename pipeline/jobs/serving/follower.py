"""Finds the version that an alias names, fetches it, and follows the alias while the server runs."""

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mlflow.exceptions import MlflowException

from pipeline.errors import ContractError, RegistryError
from pipeline.inference.files import EXAMPLE
from pipeline.jobs.console import one_line
from pipeline.registration.aliases import choose_version, find_holder, list_versions, no_champion
from pipeline.registration.tracking import Tracker, is_unreachable
from pipeline.registration.versions import download_part, fetch_packed
from pipeline.serving.config import ServedVersion, ServingConfig
from pipeline.serving.supervisor import FetchedVersion, Supervisor

LOOK_SECONDS = 600.0
"""Longest time to ask the registry and to fetch a version. After that another look begins."""
LOOK_STEP_SECONDS = 1.0
UNKNOWN_SECONDS = 60.0
"""How long the registry may be silent before the served version counts as stale."""
RETRY_SECONDS = 60.0
"""Interval at which a version that could not be served is tried again."""
log = logging.getLogger("dlrm")


class RegistryFollower:
    """Fetches the version to serve from the registry.

    Args:
        folder: Takes the files.
    """

    def __init__(self, config: ServingConfig, tracker: Tracker, name: str, folder: Path) -> None:
        self.config, self.tracker, self.name, self.folder = config, tracker, name, folder
        self.served = ""
        """Identity of the version that was fetched last."""
        self.failed = ""
        """Identity of the version that could not be fetched, if that was after."""
        self.again = 0.0
        """When to try a version again that could not be served."""
        self.number = 0
        """Versions fetched."""
        self.offered = 1
        """Number of the fetched version that was offered last."""
        self.turn = 0
        """Looks begun."""

    def find(self) -> tuple[int, str]:
        """Returns the version to serve, and a text that identifies its files.

        Raises:
            RegistryError: If there is none.
        """
        number = self.config.version
        if number is None:
            number = find_holder(self.tracker, self.name, self.config.alias)
        if number is None:
            known = ", ".join(map(str, list_versions(self.tracker, self.name)))
            if not known:
                remedy = "Train one: python -m flows.train CONFIG. dlrm serve takes the name of its model."
                raise RegistryError(f"model '{self.name}'", "a version in the registry", "none", remedy)
            if self.config.alias == "champion":
                raise no_champion(self.tracker, self.name, "Or serve one of them: version=N.")
            where = f"alias '{self.config.alias}' of model '{self.name}'"
            raise RegistryError(where, "a version", "none", f"Versions are {known}: version=N serves one.")
        return choose_version(self.tracker, self.name, number)

    def fetch(self, version: int) -> tuple[FetchedVersion, Callable[[], None]]:
        """Fetches a version. Returns what compares its files with the registered hashes, too.

        Raises:
            RegistryError: If it has none.
        """
        self.number += 1
        folder = self.folder / f"version-{version}-{self.number}"
        folder.mkdir()
        try:
            _, check = fetch_packed(self.tracker, self.name, version, folder)
            download_part(self.tracker, self.name, version, EXAMPLE, folder)
            found = self.tracker.client.get_model_version(self.name, str(version))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        served = ServedVersion(
            model=self.name, version=version, run_id=str(found.run_id), snapshot=found.tags.get("snapshot_id")
        )
        return FetchedVersion(self.number, served, folder), check

    def remove(self, version: FetchedVersion) -> None:
        """Deletes the files of a version. Processes that map them keep them until they are done."""
        shutil.rmtree(version.folder, ignore_errors=True)

    def follow(self, supervisor: Supervisor, stopped: threading.Event) -> None:
        """Offers the version that the alias names, whenever that is another one. Never raises, and waits for nobody.

        The served version is stale while the registry names another one, or none, or has been silent for a minute.
        """
        reported, heard = "", time.monotonic()
        while not stopped.wait(self.config.poll_seconds):
            error = self._look_within(supervisor, heard, stopped)
            if error is None:
                reported, heard = "", time.monotonic()
                continue
            if not (isinstance(error, OSError) or is_unreachable(error)):  # the registry has answered
                heard, supervisor.stale = time.monotonic(), one_line(error)
            if reported != (reported := one_line(error)):
                one = supervisor.current.version
                log.warning("%s: version %s goes on: %s", one.model, one.version, reported)

    def _look_within(self, supervisor: Supervisor, heard: float, stopped: threading.Event) -> Exception | None:
        """Looks once, in a thread that is given up if it hangs. Returns why it failed.

        Args:
            heard: When the registry last answered.
        """
        failed: list[Exception] = []
        ended = threading.Event()
        self.turn += 1

        def run() -> None:
            try:
                self.look(supervisor)
            except Exception as error:
                failed.append(error)
            ended.set()

        threading.Thread(target=run, name="look", daemon=True).start()
        deadline = time.monotonic() + LOOK_SECONDS
        while not ended.wait(LOOK_STEP_SECONDS) and not stopped.is_set():
            if time.monotonic() > heard + UNKNOWN_SECONDS and supervisor.stale is None:
                supervisor.stale = "the registry does not answer"
            if time.monotonic() > deadline:
                return TimeoutError(f"the registry has not answered within {LOOK_SECONDS:g} s")
        if failed and time.monotonic() > heard + UNKNOWN_SECONDS and supervisor.stale is None:
            supervisor.stale = "the registry does not answer"
        return failed[0] if failed else None

    def look(self, supervisor: Supervisor) -> None:
        """Looks once, and fetches another version.

        Raises:
            ContractError: If the registry names no version.
        """
        turn = self.turn
        number, identity = self.find()
        if identity == self.served and supervisor.rejected != self.offered:
            self.failed = ""
            if supervisor.current.number == self.offered:
                supervisor.stale = None
            return
        if supervisor.stale is None:
            supervisor.stale = f"version {number} is being loaded"
        if identity in (self.served, self.failed) and time.monotonic() < self.again:
            return
        self.again = time.monotonic() + RETRY_SECONDS
        try:
            fetched, check = self.fetch(number)
            try:
                check()
            except BaseException:
                self.remove(fetched)
                raise
        except (ContractError, MlflowException, OSError, ValueError) as error:
            self.failed = identity
            supervisor.report_failure(str(number), one_line(error))
        else:
            if turn != self.turn:  # it came too late, and another look has begun
                self.remove(fetched)
                return
            self.served, self.failed, self.offered = identity, "", fetched.number
            supervisor.offer(fetched)
