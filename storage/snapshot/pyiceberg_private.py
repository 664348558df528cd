"""What pyiceberg gives under private names only."""

from collections.abc import Callable

from pyarrow.fs import FileSystem

from storage.errors import importing_private, require_private

with importing_private("pyiceberg", "0.12."):
    from pyiceberg.expressions import visitors
    from pyiceberg.io import pyarrow as of_pyarrow
    from pyiceberg.io.pyarrow import PyArrowFile
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.update import AssertRefSnapshotId, TableUpdate, snapshot

VERSION = "0.12."
require_private(
    "pyiceberg", VERSION, {
        of_pyarrow: ["_pyarrow_to_schema_without_ids"],
        PyArrowFile: ["_filesystem", "_path", "_buffer_size"],
        Transaction: ["_table", "_updates", "_stage"],
        snapshot: ["_OverwriteFiles", "_ManifestMergeManager"],
        visitors: ["_InclusiveMetricsEvaluator"],
    },
)  # fmt: skip
to_schema_without_ids = of_pyarrow._pyarrow_to_schema_without_ids
OverwriteFiles = snapshot._OverwriteFiles
ManifestMergeManager = snapshot._ManifestMergeManager
MetricsEvaluator = visitors._InclusiveMetricsEvaluator
require_private(
    "pyiceberg", VERSION, {
        OverwriteFiles: [
            "_build_manifest_evaluator", "_case_sensitive", "_commit", "_existing_manifests", "_process_manifests",
            "_transaction",
        ],
    },
)  # fmt: skip


def place_of(file: PyArrowFile) -> tuple[str, FileSystem, int]:
    """Returns the path of a file, its file system, and the bytes of a write."""
    return file._path, file._filesystem, file._buffer_size


def table_of(transaction: Transaction) -> Table:
    """Returns the table as it was when the transaction began, or as a retry has loaded it."""
    return transaction._table


def keep_updates(transaction: Transaction, wanted: Callable[[TableUpdate], bool]) -> None:
    """Drops the updates of a transaction that are not wanted."""
    transaction._updates = tuple(filter(wanted, transaction._updates))


def require_unchanged(transaction: Transaction, branch: str, snapshot_id: int) -> None:
    """Lets the commit of a transaction fail if a branch has another snapshot by then."""
    transaction._stage((), (AssertRefSnapshotId(ref=branch, snapshot_id=snapshot_id),))
