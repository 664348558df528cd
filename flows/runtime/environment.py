"""The environment that every process of a run shares. Commands set it first; prefect.yaml sets it for deployed runs."""

import logging
import os
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "PYDANTIC_DISABLE_PLUGINS": "__all__",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": "2592000",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "RAY_USAGE_STATS_ENABLED": "0",
    "MPLBACKEND": "Agg",
}
"""No telemetry, no server that Prefect's client starts by itself (after Ctrl-C a late thread would), no pickles,
impatience with an absent MLflow, plots without screen.
Pydantic looks for plugins among all installed packages, 0.2 s in each process."""
PROFILE = "dlrm"
"""Begins the names of the Prefect profiles that we write; see `flows.deployments.profile`."""
NOISY = ("alembic", "apprise", "httpx", "matplotlib", "pyiceberg", "torch.fx._symbolic_trace", "urllib3")
"""Loggers with lines that say nothing to the user."""


def set_environment() -> None:
    """Sets the variables that are not set yet."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "PREFECT_PROFILE" not in os.environ and is_own_profile(read_profile()[0]):
        os.environ["PREFECT_PROFILE"] = "ephemeral"  # a command finds the server of its own home, and no other


def profiles_file() -> Path:
    """Returns the file with the user's Prefect profiles."""
    folder = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    return Path(os.environ.get("PREFECT_PROFILES_PATH") or folder / "profiles.toml").expanduser()


def read_profile() -> tuple[str, dict[str, Any]]:
    """Returns name and settings of the user's active Prefect profile. None where there is no readable file."""
    try:
        content = tomllib.loads(profiles_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # the last: this user has no home
        return "", {}
    name = os.environ.get("PREFECT_PROFILE") or f"{content.get('active', '')}"
    settings = content.get("profiles", {})
    found = settings.get(name, {}) if isinstance(settings, dict) else {}
    return name, found if isinstance(found, dict) else {}


def is_own_profile(name: str) -> bool:
    """Whether a Prefect profile is one that we write."""
    return name == PROFILE or name.startswith(f"{PROFILE}-")


def read_umask() -> int:
    """Returns the umask for files of a home. By default, other users get no permissions. Teams set DLRM_UMASK."""
    text = os.environ.get("DLRM_UMASK", "077")
    try:
        return int(text, 8) & 0o777
    except ValueError:
        sys.exit(f"error: DLRM_UMASK: expected an octal number such as 007, got '{text}'. Correct it.")


def keep_private() -> None:
    """Sets the umask of this process and its child processes: by default, only the owner can read new files."""
    os.umask(read_umask())


def make_private(folder: Path) -> None:
    """Creates a folder that only its owner can read. Restricts a folder that exists."""
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(PermissionError):  # another user's
        folder.chmod(folder.stat().st_mode & 0o7777 & ~read_umask())


def quiet_libraries() -> None:
    """Silences the noisy loggers, errors excepted."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
