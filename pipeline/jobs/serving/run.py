"""Serves a model: starts the processes of a server, and gives them the version that the registry names."""

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import ConfigError, ContractError, RegistryError
from pipeline.processes.process import limit_threads
from pipeline.registration.config import RegistrationConfig
from pipeline.serving.config import ServingConfig
from pipeline.serving.supervisor import FetchedVersion, Supervisor
from storage.scratch import ScratchFolder

BACKLOG = 1_024
MODULE = "pipeline.jobs.serving.worker"
log = logging.getLogger("dlrm")


def serve(name: str, config: ServingConfig, registration: RegistrationConfig, home: Path) -> None:
    """Serves a model until it is interrupted.

    Args:
        name: The model in the registry.
        registration: Names the registry.
        home: Folder of the embedded registry, and of temporary files.
    Raises:
        ContractError: If there is no such model, its files are damaged, or the port is in use.
    """
    config = config.model_copy(update={"log": None if config.log is None else config.log.resolve()})
    with listen(config) as listener:
        check_registry(name, registration, home)
        with ScratchFolder("serve-", home / "tmp") as place:
            folder = Path(place)
            (folder / "metrics").mkdir()
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder / "metrics")
            from pipeline.serving.metrics import ServerMetrics  # its library reads the variable when it is imported

            command = [sys.executable, "-m", MODULE, config.model_dump_json(), name]
            metrics, environment = ServerMetrics(folder / "metrics"), os.environ | limit_threads(config.threads)
            with Supervisor(command, environment, config.processes, listener, metrics) as supervisor:
                _serve(name, config, registration, home, folder, supervisor)


def _serve(
    name: str, config: ServingConfig, registration: RegistrationConfig, home: Path, folder: Path, supervisor: Supervisor
) -> None:
    from pipeline.jobs.serving.follower import RegistryFollower  # loads MLflow while the processes load PyTorch
    from pipeline.registration.tracking import Tracker, reporting_unreachable

    with reporting_unreachable("Start it, or name another: MLFLOW_TRACKING_URI."):
        follower = RegistryFollower(config, Tracker(registration, home, experiment=None), name, folder)
        number, follower.served = follower.find()
        first, check = follower.fetch(number)
        follower.offered = first.number

    def announce() -> None:
        one, where = first.version, f"http://{config.host}:{supervisor.listener.getsockname()[1]}"
        snapshot = f", snapshot {one.snapshot}" if one.snapshot else ""
        log.info("%s version %s (run %s%s) answers at %s", name, one.version, one.run_id, snapshot, where)

    supervisor.begin(first, announce, follower.remove)
    # All other versions are checked before they answer. This would let a large model wait for seconds or minutes.
    threading.Thread(target=_check_first, args=(supervisor, first, check), name="check", daemon=True).start()
    stopped = threading.Event()
    if config.version is None:
        threading.Thread(target=follower.follow, args=(supervisor, stopped), name="follow", daemon=True).start()
    try:
        supervisor.run()
    finally:
        stopped.set()


def _check_first(supervisor: Supervisor, first: FetchedVersion, check: Callable[[], None]) -> None:
    """Ends the server if the version that it answers with is not the registered one."""
    try:
        check()
    except (ContractError, OSError) as error:
        supervisor.fail(first, error)


def listen(config: ServingConfig) -> socket.socket:
    """Returns the listening socket.

    Raises:
        ConfigError: If the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        remedy = f"Stop what listens there, or choose another: port={config.port + 1}."
        raise ConfigError.of(f"cannot listen on {config.host}:{config.port}: {error.strerror}", remedy) from None
    listener.listen(BACKLOG)
    return listener


def check_registry(name: str, registration: RegistrationConfig, home: Path) -> None:
    """Refuses a home without models, where MLflow would make an empty database.

    Raises:
        RegistryError: If the home has none, and no other registry is named.
    """
    named = registration.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if named is None and not (home / "mlflow" / "mlflow.db").is_file():
        remedy = "Train it first, or name the registry: DLRM_HOME or MLFLOW_TRACKING_URI."
        raise RegistryError(f"model '{name}'", f"a registry in {home}", "none", remedy)
