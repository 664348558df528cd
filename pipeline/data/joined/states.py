"""Notes the state of a feature source in a few bytes, and restores it later."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.data.formats.files import fingerprint
from pipeline.data.joined.source import PinnedSource, pin_sources
from pipeline.errors import ConfigError, StorageError
from pipeline.transforms.joins import AnySource
from storage.reader import SnapshotRef
from storage.warehouse import Warehouse


def note_states(sources: Sequence[AnySource], root: Path, warehouse: Warehouse) -> dict[str, str]:
    """Returns name of a feature source -> its present state. Leaves out sources that are not there yet."""
    found = {}
    for source in {source.name: source for source in sources}.values():
        try:
            found[source.name] = note_state(pin_sources([source], root, warehouse)[0])
        except (ConfigError, StorageError):  # whoever reads the source says what is wrong
            continue
    return found


def note_state(pinned: PinnedSource) -> str:
    """Returns the snapshot of a table, or a hash of files and the time of the newest one."""
    if pinned.snapshot is not None:
        return f"{pinned.snapshot.snapshot_id}"
    return f"{fingerprint(pinned.stamps)} {max(changed for _, _, changed in pinned.stamps)}"


def restore_state(now: PinnedSource, state: str, warehouse: Warehouse) -> PinnedSource | None:
    """Returns a feature source as it was in a noted state. None: that state is lost.

    It is lost when the snapshot of a table has expired, or when a file has been changed or removed since.

    Args:
        now: The source as it is now.
        state: From `note_state`.
    """
    if now.snapshot is not None:
        if not state.isdigit() or warehouse.table(now.snapshot.table).snapshot_by_id(int(state)) is None:
            return None
        return now.model_copy(update={"snapshot": SnapshotRef(table=now.snapshot.table, snapshot_id=int(state))})
    newest = state.rpartition(" ")[2]
    files = [pair for pair in zip(now.files, now.stamps, strict=True) if newest.isdigit() and pair[1][2] <= int(newest)]
    names, stamps = tuple(name for name, _ in files), tuple(one for _, one in files)
    then = now.model_copy(update={"files": names, "stamps": stamps})
    return then if files and note_state(then) == state else None
