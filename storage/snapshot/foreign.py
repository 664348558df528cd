"""A table that another engine writes, read under a name of ours."""

from collections.abc import Callable
from contextlib import suppress

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchIdentifierError, NoSuchNamespaceError, NoSuchTableError
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.utils.config import Config

from storage.config import TableConfig
from storage.errors import StorageError


class ForeignTable(Table):
    """A table of another engine. It is only read.

    Attributes:
        alias: The name that it is read under.
        source: Its own name, and how its rows tell their day.
    """

    def __init__(self, table: Table, alias: str, source: TableConfig) -> None:
        super().__init__(table.name(), table.metadata, table.metadata_location, table.io, table.catalog, table.config)
        self.alias, self.source = alias, source


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


def load_foreign(own: Catalog, alias: str, source: TableConfig) -> ForeignTable:
    """Loads a table of another engine.

    Args:
        own: The catalog of the warehouse.
        alias: The name that the table is read under.
        source: The table.
    Raises:
        StorageError: If there is no such table.
    """
    first, _, rest = source.table.partition(".")
    known = Config().get_known_catalogs()
    tries: list[tuple[Callable[[], Catalog], str]] = [(lambda: own, source.table)]
    if "." in rest and first.lower() in known:
        tries = [(lambda: load_catalog(first), rest)]
    elif "." in rest and isinstance(own, SqlCatalog):  # each catalog of a database sees its own tables alone
        tries.append((lambda: SqlCatalog(first, **own.properties), rest))
    for opened, name in tries:
        with suppress(NoSuchTableError, NoSuchNamespaceError, NoSuchIdentifierError):
            return ForeignTable(opened().load_table(name), alias, source)
    raise StorageError(
        f"table '{source.table}'", "a table of that catalog and namespace", "none of that name", "Correct the name. "
        f"Catalogs in pyiceberg's own configuration: {', '.join(known) or 'none'}. Otherwise set warehouse.catalog.",
    )  # fmt: skip
