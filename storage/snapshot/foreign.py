"""A table that another engine writes, read under a name of ours."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchIdentifierError, NoSuchNamespaceError, NoSuchTableError, RESTError
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.utils.config import Config
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from storage.config import TableConfig
from storage.errors import StorageError, reading_metadata

VIEWS = (
    "SELECT 1 FROM iceberg_tables WHERE catalog_name = :catalog AND table_namespace = :namespace"
    " AND table_name = :name AND iceberg_type = 'VIEW'"
)
"""How an SQL catalog tells a view, which pyiceberg does not ask."""


class ForeignTable(Table):
    """A table of another engine. It is only read.

    Attributes:
        alias: The name that it is read under.
        source: Its own name, and how its rows tell their day.
    """

    def __init__(self, table: Table, alias: str, source: TableConfig) -> None:
        super().__init__(table.name(), table.metadata, table.metadata_location, table.io, table.catalog, table.config)
        self.alias, self.source = alias, source

    def refuse_change(self) -> NoReturn:
        """Raises the error about a change."""
        raise StorageError(
            f"table '{self.alias}'", "a table of our own to change it", f"'{self.source.table}' of another engine",
            "It is only read. Change it with that engine.",
        )  # fmt: skip

    def _do_commit(self, updates: Any, requirements: Any) -> NoReturn:
        """All of pyiceberg's changes end here."""
        self.refuse_change()


def remedy_of(table: Table, own: str, theirs: str) -> str:
    """Returns the remedy that works for a table: one for ours, or one for that of another engine.

    Args:
        theirs: Its `{}` is the table's own name.
    """
    return theirs.format(table.source.table) if isinstance(table, ForeignTable) else own


def alias_of(table: Table) -> str:
    """Returns the name that a table is read under."""
    return table.alias if isinstance(table, ForeignTable) else str(table.name()[-1])


def newest_snapshot(table: Table) -> Snapshot | None:
    """Returns the newest snapshot of a table, or of the branch that is read. None: nothing was written yet."""
    branch = table.source.branch if isinstance(table, ForeignTable) else None
    if branch is None:
        return table.current_snapshot()
    found = table.snapshot_by_name(branch)
    if found is None:
        raise StorageError(
            f"branch '{branch}' of table '{table.name()[-1]}'", "a branch or tag of the table",
            f"none of that name, known: {', '.join(sorted(table.refs())) or 'none'}", "Correct the name.",
        )  # fmt: skip
    return found


class ForeignTables:
    """Opens tables of other engines. Remembers where they are, with their catalogs open.

    Args:
        tables: Name that a table is read under -> the table.
    """

    def __init__(self, tables: Mapping[str, TableConfig]) -> None:
        self._tables = tables
        self._places: dict[str, tuple[Catalog, str]] = {}

    def __contains__(self, alias: str) -> bool:
        return alias in self._tables

    def load(self, own: Catalog, alias: str) -> ForeignTable:
        """Loads a table in its current state.

        Args:
            own: The catalog of the warehouse.
            alias: The name that the table is read under.
        Raises:
            StorageError: If there is no such table.
        """
        source = self._tables[alias]
        places = [self._places[alias]] if alias in self._places else _places(own, source.table)
        for catalog, name in places:
            with suppress(NoSuchTableError, NoSuchNamespaceError, NoSuchIdentifierError):
                with reading_metadata(source.table):
                    found = ForeignTable(catalog.load_table(name), alias, source)
                self._places[alias] = (catalog, name)
                return found
        if any(_is_view(catalog, name) for catalog, name in _places(own, source.table)):
            raise StorageError(
                f"'{source.table}'", "a table", "a view, which is a query of its engine",
                "Name the table that it reads, or have its engine write its rows to a table.",
            )  # fmt: skip
        known = ", ".join(Config().get_known_catalogs()) or "none"
        raise StorageError(
            f"table '{source.table}'", "a table of that catalog and namespace", "none of that name",
            f"Correct the name. Catalogs in pyiceberg's own configuration: {known}. Otherwise set warehouse.catalog.",
        )  # fmt: skip


def _is_view(catalog: Catalog, name: str) -> bool:
    """Whether a catalog has a view of that name. Those without views, and those that refuse to tell, have none."""
    if not isinstance(catalog, SqlCatalog):
        with suppress(RESTError, NotImplementedError):
            return catalog.view_exists(name)
        return False
    *namespace, view = name.split(".")
    asked = {"catalog": catalog.name, "namespace": ".".join(namespace), "name": view}
    with suppress(SQLAlchemyError), catalog.engine.connect() as connection:  # a catalog of version 0 knows no views
        return connection.execute(text(VIEWS), asked).scalar() is not None
    return False


def _places(own: Catalog, table: str) -> Iterator[tuple[Catalog, str]]:
    """Yields the catalogs that may have a table, and its name there."""
    first, _, rest = table.partition(".")
    if "." in rest and first.lower() in Config().get_known_catalogs():
        yield load_catalog(first), rest
        return
    yield own, table
    if "." in rest and isinstance(own, SqlCatalog):  # each catalog of a database sees its own tables alone
        yield SqlCatalog(first, **own.properties), rest
