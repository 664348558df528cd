"""Prefect flows. Importing the package sets the environment that every process of a run shares."""

import atexit
import logging
import os
import sys

import pipeline  # noqa: F401  first, before all that takes long to import

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
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
}
"""No telemetry, no pickles, patient start of Prefect's temporary server, impatience with an MLflow that is away."""

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
for _name in ("alembic", "httpx", "matplotlib", "pyiceberg", "torch.fx._symbolic_trace", "urllib3"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # lines that say nothing to the user


@atexit.register  # before Prefect's and so run after it: only the teardown of the interpreter comes later
def _end_quietly() -> None:
    """DuckDB 2.0 prints a page about leaked bindings when the interpreter is torn down after a flow run."""
    sys.stderr.flush()
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
