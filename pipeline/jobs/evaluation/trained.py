"""Reads the joined features of a registered model as they were declared when it was trained."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.config.files import ROOT
from pipeline.data.joined.source import FeatureSource, PinnedSource, pin_sources
from pipeline.jobs.workspace import Workspace
from pipeline.transforms.joins import AnySource
from storage.reader import SnapshotRef

_OF_OTHERS = {"path", "columns", "seconds", "take", "stored"}
"""Keys that do not decide what a column of a given name is: where the source is, and which other columns it adds."""


class TrainedColumns(NamedTuple):
    """How to read a model's columns that the config no longer declares, or declares in another way."""

    joined: tuple[PinnedSource, ...] = ()
    """Sources to read besides those of the config."""
    names: Mapping[str, str] = {}
    """Column of the model -> its name in the rows."""


AS_DECLARED = TrainedColumns()
"""All columns are read as the config declares them."""


def read_as_trained(
    workspace: Workspace, version: int, rows: SnapshotRef, trained: Sequence[PinnedSource], columns: Sequence[str]
) -> TrainedColumns:
    """Returns how to read a model's columns beside those of the config, and of other versions.

    Args:
        version: The model's. Its own columns get a prefix with this number.
        rows: The table to which they are joined. A column that it has by now is read there if no source of the config
            makes it.
        trained: Sources of the model's training. They are read as they are now.
        columns: Those that the model reads.
    Raises:
        ConfigError: If a source is gone.
        StorageError: The same.
    """
    changed = _changed(workspace, rows, trained, columns)
    prefix = f"v{version}__"
    beside = [source.model_copy(update={"prefix": f"{prefix}{source.prefix}"}) for source in changed]
    pinned = pin_sources(beside, ROOT, workspace.warehouse)
    made = [name for one in pinned for name in FeatureSource(one, workspace.warehouse).schema.names]
    names = {column: f"{prefix}{column}" for column in columns if f"{prefix}{column}" in made}
    return TrainedColumns(pinned, names)


def sources_as_trained(
    workspace: Workspace, rows: SnapshotRef, trained: Sequence[PinnedSource]
) -> tuple[PinnedSource, ...]:
    """Returns the sources of the config, with those of a model's training in place of those that differ.

    Arguments and errors are those of `read_as_trained`.
    """
    named = [name for one in trained for name in one.source.added_names()]
    changed = _changed(workspace, rows, trained, named)
    made = [name for source in changed for name in source.added_names()]
    own = [source for source in workspace.config.features.sources if not source.stored]
    kept = [source for source in own if not any(source.may_add(column) for column in made)]
    return pin_sources([*kept, *changed], ROOT, workspace.warehouse)


def _changed(
    workspace: Workspace, rows: SnapshotRef, trained: Sequence[PinnedSource], columns: Sequence[str]
) -> list[AnySource]:
    """Returns sources with a column of the model that the config does not make in the same way."""
    own, table = workspace.config.features.sources, {*workspace.warehouse.schema(rows).names}

    def differs(source: AnySource, column: str) -> bool:
        declared = [_meaning(one) for one in own if one.may_add(column)]
        known = _meaning(source) in declared if declared else column in table
        return source.may_add(column) and not known

    return [one.source for one in trained if any(differs(one.source, column) for column in columns)]


def _meaning(source: AnySource) -> dict[str, Any]:
    return {"section": source.section} | source.model_dump(mode="json", exclude=_OF_OTHERS)
