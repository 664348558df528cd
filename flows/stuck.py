"""Runs that a Prefect server holds and nobody begins.

Asks the server's API by the standard library alone: the doctor has to work where Prefect is what is broken.
"""

import datetime
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

POOL = "dlrm"
PATIENCE_SECONDS = 60.0
"""A worker asks for runs every 10 seconds, and a process takes some 20 to begin."""
Finding = tuple[str, bool, str, str]
"""Name of a check, whether it is fine, what was found, and the remedy."""


def stuck_runs(environment: Mapping[str, str], patience_seconds: float = PATIENCE_SECONDS) -> list[Finding]:
    """Runs that are late, or that a worker took and did not begin; none where no server is named or answers."""
    address = environment.get("PREFECT_API_URL", "").rstrip("/")
    if not address.startswith("http"):
        return []
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=patience_seconds)
    try:
        pending = [run for run in _runs(address, "PENDING") if _time(run["state"]["timestamp"]) <= since]
        late = _runs(address, "SCHEDULED", {"expected_start_time": {"before_": since.isoformat()}})
        working = any(worker["status"] == "ONLINE" for worker in _workers(address)) if late else True
    except (urllib.error.URLError, OSError):
        return []  # that the server does not answer is a finding of its own
    return [*map(_pending, pending), *(_late(run, working) for run in late)]


def _pending(run: Mapping[str, Any]) -> Finding:
    found = f"handed to a worker at {run['state']['timestamp']:.19}, not begun"
    remedy = f"Its worker is gone. End it: `prefect flow-run cancel {run['id']}`, then run it again."
    return f"run '{run['name']}'", False, found, remedy


def _late(run: Mapping[str, Any], working: bool) -> Finding:
    found = f"due at {run['expected_start_time']:.19}, queue '{run['work_queue_name']}'"
    if not working:
        return f"run '{run['name']}'", False, f"{found}, no worker", "Start one: `make worker`."
    remedy = "It waits for those before it in its queue; `make deploy TRAININGS=2` lets in two at a time."
    return f"run '{run['name']}'", True, found, remedy


def _runs(address: str, state: str, more: Mapping[str, Any] | None = None) -> list[Any]:
    return _posted(f"{address}/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": [state]}}, **(more or {})}})


def _workers(address: str) -> list[Any]:
    try:
        return _posted(f"{address}/work_pools/{POOL}/workers/filter", {})
    except urllib.error.HTTPError as error:
        if error.code == 404:  # no such pool
            return []
        raise


def _posted(address: str, body: Mapping[str, Any]) -> list[Any]:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        found: list[Any] = json.load(answer)
        return found


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)
