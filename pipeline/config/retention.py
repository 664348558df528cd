"""What `flows.clean` keeps, and for how long."""

from pydantic import BaseModel, NonNegativeInt, PositiveFloat


class RetentionConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """How long daily work is kept. Versions with an alias and the two champions before the present one always stay,
    and so does the version that each of them continues.

    None keeps everything of a kind. Ages are in days and may be fractions.
    """

    runs_days: PositiveFloat | None = 30
    """Folders below `home`/runs and `home`/replays: checkpoints, weights and logs. Counted from the last change. Also
    the verdicts below `home`/judged, the reports of ingests and of `flows.consistency` below `home`/reports, and the
    records of reads below `home`/reads, from which table layouts are proposed, and the fitted plans below
    `home`/plans."""
    versions_days: PositiveFloat | None = 90
    """Model versions without an alias, with their files. Also records of moves that no rollback needs."""
    versions_kept: NonNegativeInt = 30
    """Newest versions of a model, and newest moves of its aliases, kept at any age."""
    mlflow_days: PositiveFloat | None = 365
    """MLflow runs without a kept version: metrics, figures and reports."""
    snapshots_days: PositiveFloat | None = 7
    """Snapshots that no kept version and no kept run was trained on."""
    prefect_days: PositiveFloat | None = 30
    """Ended flow runs in Prefect's database."""
    leftovers_days: PositiveFloat = 2
    """Temporary files of killed work, and columns of the cache that no run has read. Must be longer than any command
    runs."""
