"""What a server counts, in Prometheus's format, summed over its processes."""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.045, 0.06, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds."""
FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Variable that prometheus-client reads when it is imported: its folder for the counts of several processes."""


class _FilledFiles(MultiProcessCollector):
    """Reads the counts of all processes. Leaves out files that their process made and has not filled yet.

    A process that is killed in that moment leaves such a file for good.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(None, folder)
        self.folder = Path(folder)

    def collect(self) -> Iterable[Metric]:
        filled = [str(path) for path in self.folder.glob("*.db") if _is_filled(path)]
        found: Iterable[Metric] = self.merge(filled)
        return found


def _is_filled(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:  # a process ended, and its gauges have just been removed
        return False


class ServerMetrics:
    """Counts of this process.

    Args:
        folder: What `FOLDER` names. None: this process is the only one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        own = self.registry = CollectorRegistry()
        self._requests = Counter("dlrm_requests", "Requests by path and status.", ["path", "status"], registry=own)
        self._seconds = Histogram(
            "dlrm_request_seconds", "Time from the request to its answer.", ["path"], registry=own, buckets=BUCKETS
        )
        self.rows = Counter("dlrm_rows", "Rows that were scored.", registry=own)
        self.queue = Gauge(
            "dlrm_queue_depth", "Requests that wait or are scored.", registry=own, multiprocess_mode="livesum"
        )
        self.processes = Gauge(
            "dlrm_ready_processes", "Processes that answer, by version.", ["model", "version"], registry=own,
            multiprocess_mode="livesum",
        )  # fmt: skip
        self.reloads = Counter("dlrm_reloads", "Changes of version, counted by each process.", registry=own)
        self.failures = Counter("dlrm_reload_failures", "Versions that could not be loaded.", registry=own)
        self.stale = Gauge(
            "dlrm_stale", "1 while another version should be served than is.", registry=own,
            multiprocess_mode="livemax",
        )  # fmt: skip
        self.restarts = Counter("dlrm_restarts", "Processes that had to be replaced.", registry=own)
        self.logged = Counter("dlrm_logged_rows", "Rows written to the log.", registry=own)
        self.dropped = Counter("dlrm_log_dropped_rows", "Rows that the log could not take.", registry=own)
        self.count = lru_cache(maxsize=512)(self._requests.labels)
        self.time = lru_cache(maxsize=64)(self._seconds.labels)

    def count_log(self, written: int, dropped: int) -> None:
        """Counts rows that the log wrote or could not take."""
        self.logged.inc(written)
        self.dropped.inc(dropped)

    def text(self) -> bytes:
        """Returns all metrics of all processes."""
        if self.folder is None:
            return generate_latest(self.registry)
        shared = CollectorRegistry()
        shared.register(_FilledFiles(str(self.folder)))
        return generate_latest(shared)

    def forget(self, pid: int) -> None:
        """Removes the gauges of a process that ended. Its counters stay."""
        if self.folder is not None:
            mark_process_dead(pid, str(self.folder))
