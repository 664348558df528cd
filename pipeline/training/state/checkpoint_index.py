"""The list of a training's checkpoints in an object store: one file, which only the last claimant replaces."""

import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Annotated

from pydantic import BaseModel, StringConstraints, ValidationError

from pipeline.errors import StorageError, TrainingError
from storage.objects import ObjectFolder

INDEX = "index.json"


class Manifest(BaseModel, frozen=True):
    """The files of a checkpoint in a store."""

    at: Annotated[str, StringConstraints(pattern=r"^[a-z]+(-[0-9]{10})?[-/][0-9a-f]{32}$")]
    """Folder of the files. Each save has its own, so a checkpoint of the same name is replaced at once."""
    files: Mapping[Annotated[str, StringConstraints(pattern=r"^\.?[A-Za-z0-9_][A-Za-z0-9_.-]*$")], str]
    """File -> SHA-256. A name becomes a path where the checkpoint is copied to, so it names no folder."""


class _Content(BaseModel, frozen=True):
    """Content of the index."""

    training: str | None
    """Token of the training that has claimed the checkpoints. None: none has."""
    attempt: str
    """Token of the object that wrote this."""
    checkpoints: Mapping[str, Manifest]
    """Name -> its files."""


class CheckpointIndex:
    """Says which checkpoints of a training are in a store.

    A store replaces one file at once, and nothing larger. So this one file is written last, on condition that it still
    has the content that was read (see `ObjectFolder.swap`). A training claims it before its ranks start, and each
    attempt of the ranks opens it. From then on, whoever wrote it before is refused: a machine that stood still until
    its lock had ended, or ranks that outlived their attempt.

    Args:
        store: Folder of the checkpoints.
        training: Token of the training.
    """

    def __init__(self, store: ObjectFolder, training: str | None = None) -> None:
        self.store, self.training, self.attempt = store, training, uuid.uuid4().hex

    def read(self) -> Mapping[str, Manifest]:
        """Returns name -> files of the checkpoints.

        Raises:
            StorageError: If the index is damaged.
        """
        return self._read()[1].checkpoints

    def claim(self) -> None:
        """Gives the checkpoints to this training."""
        self._replace(lambda found: True)

    def open(self) -> Mapping[str, Manifest]:
        """Gives the checkpoints to this attempt of the training that has claimed them, and returns them.

        Raises:
            TrainingError: If another training has claimed them.
        """
        return self._replace(lambda found: found.training == self.training)

    def add(self, name: str, manifest: Manifest) -> Manifest | None:
        """Adds a checkpoint. Returns the one of this name that it replaces.

        Raises:
            TrainingError: If another training or attempt has the checkpoints. Nothing is changed then.
        """
        before = self._replace(self._is_own, lambda found: {**found, name: manifest})
        return before.get(name)

    def drop(self, names: Collection[str]) -> list[Manifest]:
        """Removes checkpoints, and returns those that were there. Their files stay. Raises as `add`."""
        before = self._replace(self._is_own, lambda found: {one: found[one] for one in found if one not in names})
        return [before[name] for name in names if name in before]

    def _is_own(self, found: _Content) -> bool:
        return found.attempt == self.attempt

    def _replace(
        self,
        is_allowed: Callable[[_Content], bool],
        change: Callable[[Mapping[str, Manifest]], Mapping[str, Manifest]] = lambda found: found,
    ) -> Mapping[str, Manifest]:
        """Replaces the index, and returns the checkpoints that it had before."""
        while True:
            content, found = self._read()
            if not is_allowed(found):
                raise TrainingError(
                    f"checkpoints in {self.store.address}", "no other writer",
                    "another training or attempt, which has taken them over since this one started",
                    "Let that one finish. Of this one, it has all checkpoints up to then.",
                )  # fmt: skip
            new = _Content(training=self.training, attempt=self.attempt, checkpoints=change(found.checkpoints))
            if self.store.swap(INDEX, content, new.model_dump_json().encode()):
                return found.checkpoints

    def _read(self) -> tuple[bytes | None, _Content]:
        content = self.store.read(INDEX)
        if content is None:
            return None, _Content(training=None, attempt="", checkpoints={})
        try:
            return content, _Content.model_validate_json(content)
        except ValidationError:
            raise StorageError(
                f"file '{self.store.address}/{INDEX}'", "a list of checkpoints", "other content",
                "Put it back from a copy, or remove the folder to start the training again.",
            ) from None  # fmt: skip
