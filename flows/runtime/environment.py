"""The environment that every process of a run shares. Commands set it first; prefect.yaml sets it for deployed runs."""

import logging
import os

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
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
"""No telemetry, no pickles, patience with a starting server, impatience with an absent MLflow, plots without screen."""
NOISY = ("alembic", "httpx", "matplotlib", "pyiceberg", "torch.fx._symbolic_trace", "urllib3")
"""Loggers with lines that say nothing to the user."""


def set_environment() -> None:
    """Sets the variables that are not set yet."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def quiet_libraries() -> None:
    """Silences the noisy loggers, errors excepted."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
