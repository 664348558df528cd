"""MLflow runs: one per training, always ended, and resumed instead of repeated."""

import errno
import json
import logging
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

import mlflow
import psutil
import requests
from mlflow.data.code_dataset_source import CodeDatasetSource
from mlflow.data.meta_dataset import MetaDataset
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException, RestException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking import MlflowClient
from pydantic import BaseModel, ValidationError

from pipeline.errors import AccessError, ConfigError, ContractError, RegistryError, TrackingError
from pipeline.registration.config import RegistrationConfig
from pipeline.registration.sections import in_section
from storage.errors import MOVED, SHORTAGES
from storage.scratch import ScratchFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("dlrm")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts whose files are this machine's."""
PARAM_CHARACTERS = 500
"""Longest logged parameter value. The whole config is an artifact."""
SYSTEM_SECONDS = 5
"""Interval of the system metrics."""
STOP_SECONDS = 15.0
"""How long the end of a run waits for requests on their way."""
LOCK_SECONDS = 60
"""How long to wait for a database file that another process has locked."""
BUSY, REFUSED = (408, 425, 429), (401, 403, 407)
"""HTTP status of an answer that may be another one later, and of one that refuses access."""
DENIED = re.compile(
    r"^API request to endpoint \S+ failed with error code 40[137]\b|^40[137] Client Error\b|"
    r"Tunnel connection failed: 40[137]\b",
    re.MULTILINE,
)
"""Finds the refusal of a server or of a proxy in the text of an error."""
ANSWER = re.compile(
    r"^API request to endpoint (?P<endpoint>\S+) failed with error code (?P<status>\d+) != 200"
    r"(?:\. Response body: '(?P<body>.*)')?|^(?P<code>\d\d\d) (?:Client|Server) Error\b.* for url: (?P<url>\S+)"
    r"|too many (?P<many>\d+) error responses",
    re.DOTALL,
)
"""Finds status, place and text of an answer in the text of an error."""
DOWNLOAD = re.compile(r"The following failures occurred while downloading .*?\n", re.DOTALL)
"""Begins the text of an error that stands for those of several files."""
FILE = re.compile(r"^##### File .* #####\n", re.MULTILINE)
ABSENT = re.compile(r"(?!5\d\d ).*(404 Client Error|NoSuchKey|\(404\)|No such|not exist)")
"""Recognizes the error of a file that is not there."""
SAME_START_SECONDS = 1.0
"""Two readings of one process's start time differ by less than this."""
OUTDATED = "out-of-date database schema"
"""Part of MLflow's error about tables of an earlier or later version."""
RESULT, CONFIG, FEATURES = "result.json", "config.json", "features.json"
SHARDING_PLAN = "sharding_plan.json"
"""Artifacts of a run: its result line, its config with the latest evaluation's settings, the importance of features,
and its tables by rank."""
ENVIRONMENT_LOCK = threading.Lock()
"""MLflow keeps its address in the environment. Only one of several parallel trainings may read it at a time."""
M = TypeVar("M", bound=BaseModel)
KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Makes MLflow open the experiment in its view for trainings, not for prompts."""


class Tracker:
    """Runs of one experiment.

    Args:
        config: Names the server.
        home: Folder of the embedded database and of artifacts.
        experiment: Name of the experiment. It is created if it does not exist. None: nothing is recorded, and no
            permission for an experiment is needed.
    Raises:
        TrackingError: If MLflow does not answer.
    """

    def __init__(self, config: RegistrationConfig, home: Path, experiment: str | None) -> None:
        with ENVIRONMENT_LOCK:
            named = os.environ.get("MLFLOW_TRACKING_URI")
            own = f"sqlite:///{home.resolve()}/mlflow/mlflow.db"
            self.uri = config.tracking_uri or named or own
            if self.uri == own:
                (home / "mlflow").mkdir(parents=True, exist_ok=True)
            _require_address(self.uri)
            if self.uri.startswith("sqlite:///"):
                self.uri += "" if "?" in self.uri else f"?timeout={LOCK_SECONDS}"
            mlflow.set_tracking_uri(self.uri)
            if named is None:  # MLflow has set it for the whole process, but another home has a database of its own
                os.environ.pop("MLFLOW_TRACKING_URI", None)
        self.experiment = experiment or ""
        with reporting_unreachable("Start it, or name another: registration.tracking_uri or MLFLOW_TRACKING_URI."):
            try:
                self.client = MlflowClient(tracking_uri=self.uri)
                self.experiment_id = "" if experiment is None else self._experiment(experiment, home)
            except ModuleNotFoundError as error:
                raise RegistryError(
                    f"MLflow at {redact(self.uri)}", f"the package '{error.name}'", "an environment without it",
                    "Install it, or use postgresql:// with the extra postgres.",
                ) from None  # fmt: skip
            except MlflowException as error:
                if OUTDATED not in str(error):
                    raise
                embedded = self.uri.startswith("sqlite:///")
                address = f"'{self.uri.partition('?')[0]}'" if embedded else "ADDRESS"
                raise RegistryError(
                    f"MLflow's database {redact(self.uri)}", "the tables of this MLflow", "those of another version",
                    f"Copy it, then run: .venv/bin/mlflow db upgrade {address}",
                ) from None  # fmt: skip

    def _experiment(self, name: str, home: Path) -> str:
        found = self.client.get_experiment_by_name(name)
        if found is None:
            folder = None if self.uri.startswith("http") else (home / "mlflow" / "artifacts" / name).resolve().as_uri()
            refusal = MlflowException(f"experiment '{name}' was made and is gone")
            try:
                self.client.create_experiment(name, artifact_location=folder, tags=KIND)
            except MlflowException as error:
                refusal = error
            found = self.client.get_experiment_by_name(name)
            if found is None:  # otherwise another process has created it meanwhile
                raise refusal
        if found.lifecycle_stage == "deleted":
            command = f"MLFLOW_TRACKING_URI='{redact(self.uri.partition('?')[0])}' .venv/bin/mlflow experiments restore"
            raise RegistryError(
                f"MLflow experiment '{name}'", "one that can take runs", "a deleted one",
                f"Restore it: {command} --experiment-id {found.experiment_id}. Or give the config another name.",
            )  # fmt: skip
        place = _path_of(found.artifact_location)
        if self.uri.startswith("http") and place is not None and urlsplit(self.uri).hostname not in LOOPBACK:
            log.warning(
                "MLflow at %s keeps files of experiment '%s' in '%s', which each machine has by itself: what this one "
                "logs is on no other. Start the server with --artifacts-destination, and name another experiment.",
                redact(self.uri), name, place,
            )  # fmt: skip
        return str(found.experiment_id)

    def start(self, name: str, params: Mapping[str, Any], tags: Mapping[str, str], resume: str | None) -> str:
        """Starts a run and returns its id: the run to resume if it still exists, else a new one."""
        process = {"dlrm.pid": str(os.getpid()), "dlrm.started": f"{psutil.Process().create_time():.2f}"}
        tags = {**tags, "dlrm.host": socket.gethostname()} | process
        if resume is not None:
            try:
                self.client.update_run(resume, status="RUNNING")
                self.tag(resume, tags)
                return resume
            except MlflowException as error:  # the run was deleted
                if is_unreachable(error):
                    raise
        run: Run = self.client.create_run(self.experiment_id, run_name=name, tags=dict(tags))
        shown = [Param(key, str(value)[:PARAM_CHARACTERS]) for key, value in params.items()]
        for start in range(0, len(shown), 100):
            self.client.log_batch(run.info.run_id, params=shown[start : start + 100])
        return str(run.info.run_id)

    def log(self, run_id: str, step: int, metrics: Mapping[str, float | None]) -> None:
        """Logs final metrics of a run. Skips undefined ones and those already logged with the same value."""
        now = mlflow.utils.time.get_current_time_millis()
        known = self.client.get_run(run_id).data.metrics
        named = {in_section(name): value for name, value in metrics.items() if value is not None}
        new = {key: float(value) for key, value in named.items() if known.get(key) != value}
        self.client.log_batch(run_id, metrics=[Metric(key, value, now, step) for key, value in new.items()])

    def log_points(self, run_id: str, points: Sequence[tuple[int, Mapping[str, float | None]]]) -> None:
        """Logs metrics of several steps of a run. Skips undefined ones."""
        now = mlflow.utils.time.get_current_time_millis()
        metrics = [
            Metric(in_section(name), float(value), now, step)
            for step, values in points
            for name, value in values.items()
            if value is not None
        ]
        for start in range(0, len(metrics), 1_000):  # MLflow's limit per request
            self.client.log_batch(run_id, metrics=metrics[start : start + 1_000])

    def load_curves(self, run_id: str, names: Iterable[str]) -> dict[str, list[tuple[int, float]]]:
        """Returns logged metrics by plain name as (step, value) points. A step logged twice has its last value."""
        known, curves = self.client.get_run(run_id).data.metrics, {}
        for name in names:
            key = in_section(name)
            points = self.client.get_metric_history(run_id, key) if key in known else []
            curves[name] = sorted({point.step: point.value for point in points}.items())
        return curves

    def log_figures(self, run_id: str, figures: Mapping[str, "Figure"]) -> None:
        """Logs plots as SVG under `plots/`."""
        from pipeline.figure import to_svg  # imports matplotlib, which commands that only read do not need

        for name, figure in figures.items():
            self.client.log_text(run_id, to_svg(figure), f"plots/{name}.svg")

    def load_figures(self, run_id: str, names: Iterable[str]) -> dict[str, str]:
        """Returns the plots that a run has as SVG, by name."""
        there = {item.path for item in self.client.list_artifacts(run_id, "plots")}
        paths = {name: f"plots/{name}.svg" for name in names if f"plots/{name}.svg" in there}
        return {name: self._read_text(run_id, path) for name, path in paths.items()}

    def log_json(self, run_id: str, value: Any, path: str) -> None:
        """Logs a JSON file as an artifact."""
        self.client.log_text(run_id, json.dumps(value, indent=2, sort_keys=True, default=str), path)

    def log_file(self, run_id: str, path: Path) -> None:
        """Logs a file as an artifact."""
        self.client.log_artifact(run_id, str(path))

    def log_snapshot(self, run_id: str, table: str, snapshot_id: int, rows: int) -> None:
        """Logs the training data as a data set of the run."""
        source = CodeDatasetSource(tags={"table": table, "snapshot_id": str(snapshot_id)})
        data = MetaDataset(source, name=table, digest=str(snapshot_id)[-12:])  # type: ignore[abstract]
        entity = Dataset(**data.to_dict())
        self.client.log_inputs(
            run_id, [DatasetInput(entity, [InputTag("mlflow.data.context", f"training, {rows} rows")])]
        )

    @contextmanager
    def ending(self, run_id: str) -> Iterator[None]:
        """Ends the run when the block ends: FINISHED, FAILED, or KILLED by a signal.

        If MLflow cannot be reached when a run fails, the next start ends it (`reap`). System metrics are logged until
        the block ends.
        """
        monitor = SystemMetricsMonitor(run_id, SYSTEM_SECONDS, resume_logging=True, tracking_uri=self.uri)
        monitor.start()
        try:
            yield
        except BaseException as error:
            with suppress(MlflowException):  # the first error matters more than an unreachable MLflow
                self.end(run_id, "FAILED" if isinstance(error, Exception) else "KILLED")
            raise
        finally:
            ending = threading.Thread(target=_finish, args=(monitor,), daemon=True)  # it waits for a request on its way
            ending.start()
            ending.join(STOP_SECONDS)
        command = f"python -m flows.register CONFIG run={run_id}"
        with reporting_unreachable(f"The work is done, only the status of its run is missing: {command} sets it."):
            self.end(run_id, "FINISHED")

    def end(self, run_id: str, status: str) -> None:
        """Ends a run: FINISHED, FAILED or KILLED."""
        self.client.set_terminated(run_id, status)

    def reap(self) -> list[str]:
        """Ends runs that killed processes of this machine left RUNNING, and returns their ids."""
        stale = []
        for run in self.client.search_runs([self.experiment_id], "attributes.status = 'RUNNING'"):
            if run.data.tags.get("dlrm.host") == socket.gethostname() and not _lives(run.data.tags):
                self.end(run.info.run_id, "KILLED")
                stale.append(str(run.info.run_id))
        return stale

    def find_finished(self, tags: Mapping[str, str]) -> str | None:
        """Returns the id of the newest finished run with these tags. None: there is none, or no experiment is open."""
        if not self.experiment_id:
            return None
        conditions = [f"tags.`{key}` = '{value}'" for key, value in tags.items()]
        query = " and ".join(["attributes.status = 'FINISHED'", *conditions])
        runs = self.client.search_runs([self.experiment_id], query, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def load_result(self, run_id: str) -> dict[str, Any]:
        """Loads the result line of a finished run.

        Raises:
            RegistryError: If the run has none.
        """
        record = self.read_json(run_id, RESULT)
        if not isinstance(record, dict):
            raise _damaged(run_id, RESULT)
        return record

    def read_record(self, run_id: str, path: str, kind: type[M]) -> M:
        """Reads a record that `log_json` wrote.

        Raises:
            RegistryError: If the run has no such file, or the file holds something else.
        """
        try:
            return kind.model_validate(self.read_json(run_id, path))
        except ValidationError as error:
            raise _damaged(run_id, path, ".".join(map(str, error.errors()[0]["loc"]))) from None

    def read_json(self, run_id: str, path: str) -> Any:
        """Reads what `log_json` wrote.

        Raises:
            RegistryError: If the run has no such file, or the file is no JSON.
        """
        try:
            return json.loads(self._read_text(run_id, path))
        except (ValueError, RecursionError):
            raise _damaged(run_id, path) from None
        except (MlflowException, OSError) as error:
            if is_unreachable(error) or is_disk_error(error):
                raise
            run = self.find_run(run_id)
            if run is not None and run.info.status == "FINISHED":  # another may have logged no file yet
                require_folder(f"MLflow run '{run_id}'", run.info.artifact_uri)
            raise RegistryError(
                f"MLflow run '{run_id}'", f"one with {path}", "none", "Name a run of a finished training."
            ) from None

    def _read_text(self, run_id: str, path: str) -> str:
        with ScratchFolder("dlrm-artifact-") as folder:  # MLflow's load_text asks the server of the whole process
            return Path(self.client.download_artifacts(run_id, path, str(folder))).read_text(encoding="utf-8")

    def find_run(self, run_id: str) -> Run | None:
        """Returns MLflow's record of a run. None: there is none."""
        try:
            return self.client.get_run(run_id)
        except MlflowException as error:
            if is_unreachable(error):
                raise
            return None

    def get_version(self, name: str, version: str) -> ModelVersion | None:
        """Returns MLflow's record of a model version. None: there is none."""
        try:
            return self.client.get_model_version(name, version)
        except MlflowException as error:
            if not self.lacks_model(name, error) and is_unreachable(error):
                raise
            return None

    def lacks_model(self, name: str, error: MlflowException) -> bool:
        """Whether an error about a model means that there is none that this user may see.

        MLflow's login refuses questions about a model that does not exist to all but its administrators. A search
        leaves out what the user may not see, and is allowed to all.
        """
        if not is_denied(error):
            return is_not_found(error)
        return not self.client.search_registered_models(f"name = '{name}'", max_results=1)

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Sets tags of a run."""
        self.client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])


def _damaged(run_id: str, path: str, key: str = "") -> RegistryError:
    where = f"{path} of MLflow run '{run_id}'" + (f", key '{key}'" if key else "")
    return RegistryError(where, "what a training has logged", "other content", "Train again with force=true.")


def _finish(monitor: SystemMetricsMonitor) -> None:
    """Stops a monitor, and logs what it has measured since it last logged: a short run has nothing else."""
    monitor.finish()
    measured = monitor.aggregate_metrics()
    if measured:
        with suppress(MlflowException):
            monitor.publish_metrics(measured)
            monitor.mlflow_logger.flush()


def _lives(tags: Mapping[str, str]) -> bool:
    """Whether the process of a run still lives. Its number may belong to another process by now."""
    try:
        process = psutil.Process(int(tags["dlrm.pid"]))
        same = abs(process.create_time() - float(tags["dlrm.started"])) < SAME_START_SECONDS
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (KeyError, ValueError):
        return True  # unknown
    except psutil.NoSuchProcess:
        return False


def local_path(address: str) -> Path | None:
    """Returns the folder that an address of MLflow's files names on this machine. None: it is elsewhere.

    Example:
        >>> local_path("file:///"), local_path("file:///no%20such"), local_path("s3://bucket/models")
        (PosixPath('/'), None, None)
    """
    path = _path_of(address)
    return path if path is not None and path.is_dir() else None


def require_folder(where: str, address: str) -> None:
    """Refuses files that MLflow has on this machine in a folder that is gone, as after a move of the home.

    Args:
        where: What they belong to.
    Raises:
        RegistryError: If there is no such folder.
    """
    path = _path_of(address)
    if path is not None and not path.is_dir():
        raise RegistryError(f"files of {where}", f"those in '{path}', as MLflow has it", "no such folder", MOVED)


def _path_of(address: str) -> Path | None:
    """Returns the path of an address on this machine, or None."""
    parts = urlsplit(address)
    return Path(unquote(parts.path) if parts.scheme else address) if parts.scheme in ("", "file") else None


def is_unreachable(error: Exception) -> bool:
    """Whether an error means that MLflow's server or database cannot be reached at present, or refuses access."""
    if is_denied(error):
        return True
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return error.response.status_code in BUSY or error.response.status_code >= 500
    if isinstance(error, MlflowException) and DOWNLOAD.match(str(error)):  # after the server has listed the files
        return not is_disk_error(error) and not all(map(ABSENT.match, FILE.split(str(error))[1:]))
    if isinstance(error, MlflowException):
        silent = not isinstance(error, RestException) and str(error).startswith("API request to")
        if silent and (answer := ANSWER.search(str(error))) is not None and answer["status"]:
            return int(answer["status"]) in BUSY or int(answer["status"]) >= 500
        return silent or error.error_code == "TEMPORARILY_UNAVAILABLE"
    return isinstance(error, requests.ConnectionError | requests.Timeout)


def is_denied(error: Exception) -> bool:
    """Whether MLflow's server, or a proxy before it, refuses access. That does not pass by itself.

    Example:
        >>> is_denied(MlflowException("API request to endpoint /api failed with error code 403 != 200."))
        True
    """
    if isinstance(error, RestException):
        return error.error_code in ("PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED")
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return error.response.status_code in REFUSED
    asked = isinstance(error, MlflowException | requests.ConnectionError)
    return asked and DENIED.search(str(error)) is not None


def is_disk_error(error: Exception) -> bool:
    """Whether this machine lacks disk space, permissions, open files or memory. MLflow wraps such errors.

    Example:
        >>> is_disk_error(OSError(errno.ENOSPC, "No space left on device")), is_disk_error(FileNotFoundError("no"))
        (True, False)
    """
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, *SHORTAGES)
    return any(f"[Errno {code}]" in str(error) for code in codes)


def redact(text: str) -> str:
    """Removes passwords from addresses in a text.

    Example:
        >>> redact("postgresql://me:p@ss/word@host/db?password=x&a=1")
        'postgresql://host/db?password=...&a=1'
    """
    return re.sub(r"(password|pwd)=[^&\s]*", r"\1=...", re.sub(r"//\S*@", "//", text))


def _require_address(uri: str) -> None:
    """Refuses what is no address of a server or database: MLflow takes a word for a folder, and makes any folder."""
    kind = urlsplit(uri).scheme.partition("+")[0] if not uri.startswith("databricks") else "databricks"
    if kind not in ("http", "https", "databricks", "postgresql", "mysql", "sqlite", "mssql"):
        raise ConfigError(
            "address of MLflow", "one such as http://HOST:5000, postgresql://HOST/NAME or sqlite:////PATH",
            f"'{redact(uri)}'", "Correct registration.tracking_uri, or MLFLOW_TRACKING_URI.",
        )  # fmt: skip
    folder = Path(uri.removeprefix("sqlite:///").partition("?")[0]).absolute().parent
    if uri.startswith("sqlite:///") and not folder.is_dir():
        raise ConfigError(
            f"MLflow's database {redact(uri)}", f"the folder '{folder}'", "none",
            "Make it, or correct the address: an absolute path has four slashes, sqlite:////PATH.",
        )  # fmt: skip


def is_not_found(error: MlflowException) -> bool:
    """Whether MLflow answered that the resource does not exist."""
    return str(error.error_code) == "RESOURCE_DOES_NOT_EXIST"


@contextmanager
def reporting_unreachable(remedy: str) -> Iterator[None]:
    """Raises one clear error if MLflow cannot be reached in the block.

    Raises:
        TrackingError: Names the address, without a password, and the remedy. `AccessError` if access is refused.
    """
    try:
        yield
    except AccessError:
        raise
    except TrackingError as error:
        raise TrackingError(error.where, error.expected, error.actual, remedy) from None
    except (MlflowException, requests.RequestException) as error:
        if not is_unreachable(error):
            raise
        raise explain(error, remedy) from None  # the original names passwords


def explain(error: Exception, remedy: str = "") -> ContractError:
    """Returns one sentence for an error of MLflow's client: what its server answered, to what, and what lacks.

    Args:
        remedy: What to do once it answers.

    Example:
        >>> print(explain(MlflowException("API request to endpoint /api/2.0/mlflow/runs/create failed with error code "
        ...     "413 != 200. Response body: 'too large'")))  # doctest: +ELLIPSIS
        MLflow at ...: expected an answer to runs/create, got 413 (too large). The server or a proxy before it says why.
    """
    where = f"MLflow at {redact(mlflow.get_tracking_uri())}"
    found = ANSWER.search(str(error))
    status = int(found["status"] or found["code"] or found["many"]) if found is not None else None
    place = (found["endpoint"] or urlsplit(found["url"] or "").path) if found is not None else ""
    place = place.rpartition("/mlflow/")[2]
    body = " ".join((found["body"] or "").split())[:100] if found is not None else ""
    if "Invalid Host header" in body:
        ask = "Start the server with --allowed-hosts HOST:PORT, or MLFLOW_SERVER_ALLOWED_HOSTS."
        return AccessError(where, "a server that is asked by this name", f"'{body}'", f"{ask} {remedy}".rstrip())
    if status == 401:
        ask = "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN."
        return AccessError(where, "a login", "none that it takes", f"{ask} {remedy}".rstrip())
    if is_denied(error):
        ask = "Ask for it: READ scores and serves, EDIT trains and promotes, MANAGE removes. A proxy may want a login."
        return AccessError(where, f"permission for {place or 'this'}", "a refusal", f"{ask} {remedy}".rstrip())
    if is_unreachable(error):
        reason = "a locked database" if "locked" in str(error) else "none" if status is None else f"error {status}"
        return TrackingError(where, "an answer", reason, remedy or "Run the same command again once it answers.")
    if status is not None:
        got = f"{status} ({body})" if body else f"{status}"
        return RegistryError(
            where, f"an answer to {place}", got, remedy or "The server or a proxy before it says why."
        )  # fmt: skip
    first = redact((str(error).splitlines() or [type(error).__name__])[0])[:200].rstrip(".")
    return RegistryError(where, "what was asked for", first, remedy or "See the server's log.")
