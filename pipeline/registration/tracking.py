"""MLflow runs: one per training, always ended, resumed rather than repeated."""

import errno
import json
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlflow
import psutil
import requests
from matplotlib.figure import Figure
from mlflow.data.code_dataset_source import CodeDatasetSource
from mlflow.data.meta_dataset import MetaDataset
from mlflow.entities import DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException, RestException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking import MlflowClient

from pipeline.errors import RegistryError, TrackingError
from pipeline.registration.config import RegistrationConfig

PARAM_CHARACTERS = 500
"""Longest parameter value shown; the whole config is an artifact."""
SYSTEM_SECONDS = 5
"""Between two looks at the load of the machine."""
STOP_SECONDS = 15.0
"""How long the end of a run waits for what is on its way."""
LOCK_SECONDS = 60
"""How long a database in a file is waited for while another process has it locked."""
SAME_START_SECONDS = 1.0
"""Start times of one process differ by less than this when they are read again."""
RESULT = "result.json"
ENVIRONMENT_LOCK = threading.Lock()
"""MLflow keeps its address in the environment: of trainings side by side, only one may look there at a time."""
KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Opens an experiment in MLflow's view of trainings, not of prompts."""


class Tracker:
    """Runs of one experiment.

    Args:
        config: Names the server.
        home: Folder of the embedded database and of artifacts.
        experiment: Name of the experiment, made if absent.
    Raises:
        TrackingError: If MLflow does not answer.
    """

    def __init__(self, config: RegistrationConfig, home: Path, experiment: str) -> None:
        with ENVIRONMENT_LOCK:
            named = os.environ.get("MLFLOW_TRACKING_URI")
            self.uri = config.tracking_uri or named or embedded_uri(home)
            if self.uri.startswith("sqlite:///"):
                Path(self.uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
                self.uri += "" if "?" in self.uri else f"?timeout={LOCK_SECONDS}"
            mlflow.set_tracking_uri(self.uri)
            if named is None:  # MLflow has set it for all that comes after: another home has a database of its own
                os.environ.pop("MLFLOW_TRACKING_URI", None)
        self.client = MlflowClient(tracking_uri=self.uri)
        self.experiment = experiment
        with reporting_unreachable("Start it, or name another: registration.tracking_uri or MLFLOW_TRACKING_URI."):
            self.experiment_id = self._experiment(experiment, home)

    def _experiment(self, name: str, home: Path) -> str:
        found = self.client.get_experiment_by_name(name)
        if found is None:
            folder = None if self.uri.startswith("http") else (home / "mlflow" / "artifacts" / name).resolve().as_uri()
            with suppress(MlflowException):  # made by another process meanwhile
                return str(self.client.create_experiment(name, artifact_location=folder, tags=KIND))
            found = self.client.get_experiment_by_name(name)
        assert found is not None
        return str(found.experiment_id)

    def start(self, name: str, params: Mapping[str, Any], tags: Mapping[str, str], resume: str | None) -> str:
        """The id of a running run: the one to resume if it still exists, else a new one."""
        process = {"dlrm.pid": str(os.getpid()), "dlrm.started": f"{psutil.Process().create_time():.2f}"}
        tags = {**tags, "dlrm.host": socket.gethostname()} | process
        if resume is not None:
            try:
                self.client.update_run(resume, status="RUNNING")
                self.tag(resume, tags)
                return resume
            except MlflowException as error:  # somebody has deleted it
                if is_unreachable(error):
                    raise
        run: Run = self.client.create_run(self.experiment_id, run_name=name, tags=dict(tags))
        shown = [Param(key, str(value)[:PARAM_CHARACTERS]) for key, value in params.items()]
        for start in range(0, len(shown), 100):
            self.client.log_batch(run.info.run_id, params=shown[start : start + 100])
        return str(run.info.run_id)

    def log(self, run_id: str, step: int, metrics: Mapping[str, float | None]) -> None:
        """Final metrics of a run; undefined ones are left out, and those that stand there with the same value."""
        now = mlflow.utils.time.get_current_time_millis()
        known = self.client.get_run(run_id).data.metrics
        new = {key: float(value) for key, value in metrics.items() if value is not None and known.get(key) != value}
        self.client.log_batch(run_id, metrics=[Metric(key, value, now, step) for key, value in new.items()])

    def log_points(self, run_id: str, points: Sequence[tuple[int, Mapping[str, float | None]]]) -> None:
        """Metrics of several steps of a run; undefined ones are left out."""
        now = mlflow.utils.time.get_current_time_millis()
        metrics = [
            Metric(key, float(value), now, step)
            for step, values in points
            for key, value in values.items()
            if value is not None
        ]
        for start in range(0, len(metrics), 1_000):  # the most that MLflow takes at once
            self.client.log_batch(run_id, metrics=metrics[start : start + 1_000])

    def load_curves(self, run_id: str, names: Iterable[str]) -> dict[str, list[tuple[int, float]]]:
        """Logged metrics as (step, value) points; a step logged twice counts once, by its last value."""
        history = {name: self.client.get_metric_history(run_id, name) for name in names}
        return {
            name: sorted({metric.step: metric.value for metric in points}.items()) for name, points in history.items()
        }

    def log_figures(self, run_id: str, figures: Mapping[str, Figure]) -> None:
        """Figures as PNG under `plots/`."""
        for name, figure in figures.items():
            self.client.log_figure(run_id, figure, f"plots/{name}.png")

    def log_json(self, run_id: str, value: Any, path: str) -> None:
        """A JSON file among the run's artifacts."""
        self.client.log_text(run_id, json.dumps(value, indent=2, sort_keys=True, default=str), path)

    def log_file(self, run_id: str, path: Path) -> None:
        """A file among the run's artifacts."""
        self.client.log_artifact(run_id, str(path))

    def log_snapshot(self, run_id: str, table: str, snapshot_id: int, rows: int) -> None:
        """The training data as a data set of the run."""
        source = CodeDatasetSource(tags={"table": table, "snapshot_id": str(snapshot_id)})
        data = MetaDataset(source, name=table, digest=str(snapshot_id)[-12:])  # type: ignore[abstract]
        entity = data._to_mlflow_entity()
        self.client.log_inputs(
            run_id, [DatasetInput(entity, [InputTag("mlflow.data.context", f"training, {rows} rows")])]
        )

    @contextmanager
    def ending(self, run_id: str) -> Iterator[None]:
        """Ends the run with the block, whatever ends that: FINISHED, FAILED, or KILLED by a signal.

        Where MLflow does not hear how a run failed, the next start ends it (`reap`). Until then the load of the machine
        is among its metrics.
        """
        monitor = SystemMetricsMonitor(run_id, SYSTEM_SECONDS, resume_logging=True, tracking_uri=self.uri)
        monitor.start()
        try:
            yield
        except BaseException as error:
            with suppress(MlflowException):  # what failed is more to the point than that MLflow is away as well
                self.end(run_id, "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED")
            raise
        finally:
            ending = threading.Thread(target=monitor.finish, daemon=True)  # it waits for a request that is on its way
            ending.start()
            ending.join(STOP_SECONDS)
        command = f"python -m flows.register CONFIG run={run_id}"
        with reporting_unreachable(f"The work is done, only the status of its run is missing: {command} sets it."):
            self.end(run_id, "FINISHED")

    def end(self, run_id: str, status: str) -> None:
        """Ends a run: FINISHED, FAILED or KILLED."""
        self.client.set_terminated(run_id, status)

    def reap(self) -> list[str]:
        """Ends runs that a killed process of this machine left RUNNING."""
        stale = []
        for run in self.client.search_runs([self.experiment_id], "attributes.status = 'RUNNING'"):
            if run.data.tags.get("dlrm.host") == socket.gethostname() and not _lives(run.data.tags):
                self.end(run.info.run_id, "KILLED")
                stale.append(str(run.info.run_id))
        return stale

    def find_finished(self, identity: str, tags: Mapping[str, str]) -> str | None:
        """Id of the newest run that has finished the work of this identity; None: there is none."""
        wanted = {"identity": identity, **tags}
        conditions = [f"tags.`{key}` = '{value}'" for key, value in wanted.items()]
        query = " and ".join(["attributes.status = 'FINISHED'", *conditions])
        runs = self.client.search_runs([self.experiment_id], query, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def load_result(self, run_id: str) -> dict[str, Any]:
        """The result line of a finished run."""
        record: dict[str, Any] = self.read_json(run_id, RESULT)
        return record

    def read_json(self, run_id: str, path: str) -> Any:
        """What `log_json` wrote.

        Raises:
            RegistryError: If the run has no such file.
        """
        try:
            return json.loads(mlflow.artifacts.load_text(f"runs:/{run_id}/{path}"))
        except (MlflowException, OSError) as error:
            if is_unreachable(error) or is_disk_error(error):
                raise
            raise RegistryError(
                f"MLflow run '{run_id}'", f"one with {path}", "none", "Name a run of a finished training."
            ) from None

    def get_version(self, name: str, version: str) -> ModelVersion | None:
        """A version of a model as MLflow knows it; None where there is none."""
        try:
            return self.client.get_model_version(name, version)
        except MlflowException as error:
            if is_unreachable(error):
                raise
            return None

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Tags of a run."""
        self.client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])


def embedded_uri(home: Path) -> str:
    """The database used where no server is named."""
    return f"sqlite:///{home.resolve()}/mlflow/mlflow.db"


def _lives(tags: Mapping[str, str]) -> bool:
    """Whether the process that works on a run is there: its number may have gone to another one since."""
    try:
        process = psutil.Process(int(tags["dlrm.pid"]))
        started = float(tags.get("dlrm.started", process.create_time()))  # runs of earlier versions do not say
        same = abs(process.create_time() - started) < SAME_START_SECONDS
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (KeyError, ValueError):
        return True  # nothing that we would know
    except psutil.NoSuchProcess:
        return False


def is_unreachable(error: Exception) -> bool:
    """Whether an error means that MLflow's server or database cannot be reached just now."""
    if isinstance(error, MlflowException):
        silent = not isinstance(error, RestException) and str(error).startswith("API request to")
        return silent or error.error_code == "TEMPORARILY_UNAVAILABLE"
    return isinstance(error, requests.ConnectionError | requests.Timeout)


def is_disk_error(error: Exception) -> bool:
    """Whether this machine lacks room or rights, which says nothing of what was asked for; MLflow wraps such errors.

    Example:
        >>> is_disk_error(OSError(errno.ENOSPC, "No space left on device")), is_disk_error(FileNotFoundError("no"))
        (True, False)
    """
    return any(f"[Errno {code}]" in str(error) for code in (errno.ENOSPC, errno.EDQUOT, errno.EACCES))


def redact(text: str) -> str:
    """A text whose addresses tell no password.

    Example:
        >>> redact("postgresql://me:p@ss/word@host/db?password=x&a=1")
        'postgresql://host/db?password=...&a=1'
    """
    return re.sub(r"(password|pwd)=[^&\s]*", r"\1=...", re.sub(r"//\S*@", "//", text))


def is_not_found(error: MlflowException) -> bool:
    """Whether MLflow says that there is no such thing, which is an answer."""
    return str(error.error_code) == "RESOURCE_DOES_NOT_EXIST"


@contextmanager
def reporting_unreachable(remedy: str) -> Iterator[None]:
    """Puts it into one sentence that MLflow does not answer, whatever of it was called.

    Raises:
        TrackingError: Names the address, without a password, and the remedy.
    """
    try:
        yield
    except TrackingError as error:
        raise TrackingError(error.where, error.expected, error.actual, remedy) from None
    except (MlflowException, requests.RequestException) as error:
        if not is_unreachable(error):
            raise
        address = redact(mlflow.get_tracking_uri())
        reason = "a locked database" if "locked" in str(error) else "none"
        raise TrackingError(f"MLflow at {address}", "an answer", reason, remedy) from None  # which names passwords
