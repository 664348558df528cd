"""ServingConfig: where a server listens, how much it takes, and which version it serves."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt


class ServingConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Where a server listens, how much it takes, and which version it serves."""

    host: str = "127.0.0.1"
    """Address to listen at. Other addresses than loopback need a proxy before them that authenticates callers."""
    port: int = Field(default=5001, ge=0, le=65_535)
    """Port to listen at. 0: any free one."""
    hosts: tuple[str, ...] = ()
    """Names under which callers may address the server, besides loopback and `host`. A browser sends the name of the
    page's own server, which keeps pages out whose name resolves to this machine."""
    processes: PositiveInt = 1
    """Processes that answer, over one copy of the tables."""
    threads: PositiveInt = 1
    """Threads of each process for one request's arithmetic."""
    version: PositiveInt | None = None
    """Version to serve. None: that of the alias, which is followed when it moves."""
    alias: str = "champion"
    """Alias in the registry whose version is served."""
    poll_seconds: PositiveFloat = 5.0
    """Interval at which the registry is asked where the alias is."""
    queue: PositiveInt = 64
    """Requests that a process holds, the one being scored included. Further ones get status 503."""
    deadline_seconds: PositiveFloat = 5.0
    """A request that takes longer, from its first byte to its answer, gets status 504."""
    body_bytes: PositiveInt = 32 << 20
    """Size of the largest body. A larger one gets status 413."""
    log: Path | None = None
    """Folder for Parquet files of the rows that were scored, with probability, time and version. None: no log."""
    log_keep: dict[str, Literal["long", "double", "string", "timestamp"]] = {}
    """Columns of requests, with their types, that the log takes although the model does not read them, such as
    `{user_id: long, event_time: timestamp}`. `flows.consistency` matches rows by them. A row without one has null."""
    log_bytes: PositiveInt = 1 << 30
    """Size of the folder from which on rows are dropped, until files are removed."""


class ServedVersion(BaseModel, frozen=True):
    """The version that answers."""

    model: str
    version: int
    run_id: str
    snapshot: str | None
    """Snapshot of the table that it was trained on."""
