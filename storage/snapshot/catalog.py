"""The catalog of a warehouse: opens it and creates tables in it.

An SQL catalog parses each metadata file of a table once, and its tables share their snapshots.
"""

import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa
from pyiceberg.catalog import PY_CATALOG_IMPL, TYPE, URI, Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import RESTError
from pyiceberg.io import PY_IO_IMPL, FileIO
from pyiceberg.table import CreateTableTransaction, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot, SnapshotLogEntry
from pyiceberg.utils.config import Config
from sqlalchemy.exc import SQLAlchemyError

from storage.config import DAY, WarehouseConfig, find_owner
from storage.errors import StorageError
from storage.objects import add_variables, send_lengths

KEPT_STATES = 32
"""States of tables that are remembered. One takes about 5 KB for each of its snapshots."""
_ERRNO = re.compile(r"\[Errno \d+\] ([\w ]+)")
"""What the operating system says, inside the text of an error."""
_PASSWORD = re.compile("//[^/\\s]*@")
"""User and password in an address."""
PART_OF = "dlrm.part-of"
"""Table property: the table of samples that a table belongs to."""


def open_catalog(config: WarehouseConfig, home: Path) -> Catalog:
    """Opens the catalog of a warehouse. Its namespace is created if missing.

    Args:
        home: Folder of the embedded catalog, used unless the config names another catalog.
    Raises:
        StorageError: If the catalog refuses or does not answer.
    """
    properties = dict(config.catalog)
    named = {**(Config().get_catalog_config("dlrm") or {}), **properties}  # pyiceberg's own file and variables, too
    if not properties or not named.keys() & {"type", "uri", "py-catalog-impl"}:
        home.mkdir(parents=True, exist_ok=True)
        folder = home.resolve()
        embedded = {TYPE: "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
        properties = embedded | properties
    if properties.get("warehouse", "").startswith(("file:", "/")):
        properties = {PY_IO_IMPL: "storage.durable.DurableFileIO", **properties}
    send_lengths({key: str(value) for key, value in (named | dict(properties)).items()})
    try:
        catalog = _load_catalog("dlrm", add_variables(properties))
        catalog.create_namespace_if_not_exists(config.namespace)
    except (RESTError, OSError, ValueError, SQLAlchemyError) as error:
        if not type(error).__module__.startswith(("pyiceberg.", "requests.", "pydantic_core.", "sqlalchemy.")):
            raise
        said = getattr(error, "orig", error)  # the database's own words, without SQLAlchemy's
        address, text = (_PASSWORD.sub("//", f"{one}") for one in (named.get("uri", "no uri"), said))
        known = _ERRNO.search(text)
        reason = known[1] if known else text.split("\n")[0].rstrip(".")
        remedy = "Check `warehouse.catalog`, its token or credential, and that the server runs."
        raise StorageError.of(f"cannot open the catalog at {address}: {reason}", remedy) from error
    return catalog


def _load_catalog(name: str, properties: dict[str, str]) -> Catalog:
    every = {**(Config().get_catalog_config(name) or {}), **properties}
    if f"{every.get(TYPE)}".lower() == "sql" and PY_CATALOG_IMPL not in every and URI in every:
        return ParsedOnceCatalog(name, **{key: str(value) for key, value in every.items()})
    return load_catalog(name, **properties)


def new_table(
    catalog: Catalog, name: tuple[str, str], schema: pa.Schema, layout: Mapping[str, str]
) -> CreateTableTransaction:
    """Returns a table partitioned by day, to be created by `commit_transaction`.

    Args:
        name: Namespace and name.
        layout: Properties that say how its files are written.
    """
    owner = find_owner(name[-1])
    properties = {
        **({} if owner is None else {PART_OF: owner}),
        "format-version": "2",
        **layout,
        # Statistics of hundreds of columns cost more at every commit and plan than they save.
        "write.metadata.metrics.default": "none",
        f"write.metadata.metrics.column.{DAY}": "full",
        "write.metadata.previous-versions-max": "20",
        "write.metadata.delete-after-commit.enabled": "true",
        "write.delete.isolation-level": "serializable",
    }
    creation = catalog.create_table_transaction(name, schema, properties=properties)
    with creation.update_spec() as spec:
        spec.add_identity(DAY)
    return creation


class SharedSnapshot(Snapshot):
    """A snapshot that copies of a table's metadata share. Nothing changes a snapshot."""

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self

    def __eq__(self, other: object) -> bool:
        """Compares the values. pyiceberg's own equality is that of one class."""
        return isinstance(other, Snapshot) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # as pyiceberg's


class SharedLogEntry(SnapshotLogEntry):
    """An entry of the log of snapshots that copies of a table's metadata share."""

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self

    def __eq__(self, other: object) -> bool:
        """As of `SharedSnapshot`."""
        return isinstance(other, SnapshotLogEntry) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # as pyiceberg's


class _State(NamedTuple):
    metadata: TableMetadata
    io: FileIO


class ParsedOnceCatalog(SqlCatalog):
    """pyiceberg's SQL catalog. It asks the database at each call, but parses each metadata file once.

    Such a file never changes, because each commit writes a new one. It lists all snapshots, and pyiceberg copies them
    for each commit. It changes no metadata in place, so tables share it, and copies of it share the snapshots.
    """

    def __init__(self, name: str, **properties: str) -> None:
        super().__init__(name, **properties)
        self._states: OrderedDict[str, _State] = OrderedDict()

    def _convert_orm_to_iceberg(self, orm_table: Any) -> Table:
        """Makes a table of its row in the database."""
        location = orm_table.metadata_location
        if (known := self._states.get(location)) is None:
            table = super()._convert_orm_to_iceberg(orm_table)
            known = self._states[location] = _State(_share_snapshots(table.metadata), table.io)
            while len(self._states) > KEPT_STATES:
                self._states.popitem(last=False)
        identifier = (*self.identifier_to_tuple(orm_table.table_namespace), orm_table.table_name)
        return Table(identifier, known.metadata, location, known.io, self)


def _share_snapshots(metadata: TableMetadata) -> TableMetadata:
    """Lets copies of metadata that was just parsed share its snapshots."""
    for kind, parts in ((SharedSnapshot, metadata.snapshots), (SharedLogEntry, metadata.snapshot_log)):
        for one in parts:
            object.__setattr__(one, "__class__", kind)  # a tenth of the time of making new ones
    return metadata
