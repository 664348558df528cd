"""A registry behind a network that loses requests and answers: MLflow's client with its documented behaviour.

MLflow's own store takes milliseconds a call, so thousands of schedules use this one. A request takes effect in full or
not at all, as in MLflow's database.
"""

import copy
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import (
    INVALID_PARAMETER_VALUE,
    RESOURCE_ALREADY_EXISTS,
    RESOURCE_DOES_NOT_EXIST,
    TEMPORARILY_UNAVAILABLE,
)
from mlflow.store.entities import PagedList

from pipeline.inference.files import PACKED
from tests.simulation.disk import Disk
from tests.simulation.world import World, require

AWAY, LOST, TWICE = "MLflow is away", "an answer of MLflow is lost", "a request comes twice"
FAULTS = (AWAY, LOST, TWICE)


class Server:
    """Runs, versions, aliases and files.

    Args:
        now: The server's clock, in seconds.
        moved: Called with alias and version when an alias moves.
    """

    def __init__(self, world: World, disk: Disk, now: Callable[[], float], moved: Callable[[str, int], None]) -> None:
        self.world, self.disk, self.now, self.moved = world, disk, now, moved
        self.runs: dict[str, Any] = {}
        self.models: dict[str, Any] = {}
        self.versions: dict[tuple[str, str], Any] = {}
        self.logged: dict[str, dict[str, bytes]] = {}
        """Id of a logged model -> its files."""
        self.files: dict[tuple[str, str], str] = {}
        """(run, path) -> text."""
        self.numbers = itertools.count(1)
        self.calls = self.doubled = 0
        """Requests so far, and versions that exist twice because their request came twice."""

    def call(self, name: str, work: Callable[[], Any]) -> Any:
        """Lets a request pass the network."""
        self.disk.strike("request", str(self.disk.root / name))
        if self.disk.quiet:
            return copy.deepcopy(work())
        self.calls += 1
        if self.world.strikes(AWAY):
            self.world.note(f"at {name}")
            raise MlflowException("API request to http://sim failed", TEMPORARILY_UNAVAILABLE)
        found = work()
        if self.world.strikes(TWICE):  # the client repeats it when the connection breaks
            self.world.note(f"at {name}")
            self.doubled += name == "create_model_version"
            found = work()
        if self.world.strikes(LOST):
            self.world.note(f"at {name}")
            raise MlflowException("API request to http://sim failed", TEMPORARILY_UNAVAILABLE)
        self.disk.after("request", str(self.disk.root / name))
        return copy.deepcopy(found)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        work = getattr(Server, f"_{name}", None)
        if work is None:
            raise AttributeError(name)
        return lambda *args, **kwargs: self.call(name, lambda: work(self, *args, **kwargs))

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _create_run(self, experiment: str, run_name: str, tags: Mapping[str, str]) -> Any:
        run_id = f"run{next(self.numbers)}"
        info = SimpleNamespace(run_id=run_id, status="RUNNING", run_name=run_name, artifact_uri=f"sim:/{run_id}")
        self.runs[run_id] = SimpleNamespace(info=info, data=SimpleNamespace(tags=dict(tags), metrics={}, params={}))
        return self.runs[run_id]

    def _update_run(self, run_id: str, status: str) -> None:
        self._get_run(run_id).info.status = status

    def _set_terminated(self, run_id: str, status: str) -> None:
        self._update_run(run_id, status)

    def _get_run(self, run_id: str) -> Any:
        if run_id not in self.runs:
            raise MlflowException("no such run", RESOURCE_DOES_NOT_EXIST)
        return self.runs[run_id]

    def _log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        run = self._get_run(run_id)
        run.data.metrics |= {one.key: one.value for one in metrics}
        run.data.tags |= {one.key: one.value for one in tags}

    def _search_runs(self, experiments: Any, query: str, **_: Any) -> list[Any]:
        assert query == "attributes.status = 'RUNNING'"
        return [run for run in self.runs.values() if run.info.status == "RUNNING"]

    def _log_text(self, run_id: str, text: str, path: str) -> None:
        self._get_run(run_id)
        self.files[run_id, path] = text

    def _log_artifact(self, run_id: str, path: str) -> None:
        self.files[run_id, Path(path).name] = Path(path).read_text(encoding="utf-8")

    # -- models -------------------------------------------------------------------------------------------------------

    def _create_logged_model(self, experiment: str, name: str, source_run_id: str, params: Any) -> Any:
        self._get_run(source_run_id)
        number = f"m-{next(self.numbers)}"
        self.logged[number] = {}
        return SimpleNamespace(model_id=number, artifact_location=number)

    def _log_outputs(self, run_id: str, models: Any) -> None:
        self._get_run(run_id)

    def _finalize_logged_model(self, number: str, status: Any) -> None:
        self._get_logged_model(number)

    def _get_model_version_download_uri(self, name: str, version: str) -> str:
        return f"sim://{self._get_model_version(name, version).model_id}"

    def _create_registered_model(self, name: str) -> None:
        if name in self.models:
            raise MlflowException("exists", RESOURCE_ALREADY_EXISTS)
        self.models[name] = SimpleNamespace(name=name, aliases={}, tags={})

    def _create_model_version(self, name: str, source: str, run_id: str, tags: Any, model_id: str) -> Any:
        self._get_registered_model(name)
        number = str(1 + max((int(one) for model, one in self.versions if model == name), default=0))
        self.versions[name, number] = SimpleNamespace(
            name=name, version=number, source=source, run_id=run_id, tags=dict(tags), model_id=model_id,
            creation_timestamp=int(1e3 * self.now()), description="",
        )  # fmt: skip
        return self.versions[name, number]

    def _get_model_version(self, name: str, version: str) -> Any:
        if (name, version) not in self.versions:
            raise MlflowException("no such version", RESOURCE_DOES_NOT_EXIST)
        found = self.versions[name, version]
        found.aliases = [alias for alias, number in self.models[name].aliases.items() if number == version]
        return found

    def _search_model_versions(self, query: str, **_: Any) -> Any:
        found = list(self.versions.values())
        for condition in filter(None, query.split(" and ")):
            key, value = condition.partition(" = ")[::2]
            found = [one for one in found if _field(one, key) == value.strip("'")]
        return PagedList(found, None)

    def _search_registered_models(self, page_token: str | None = None) -> Any:
        return PagedList(list(self.models.values()), None)

    def _get_registered_model(self, name: str) -> Any:
        if name not in self.models:
            raise MlflowException("no such model", RESOURCE_DOES_NOT_EXIST)
        return self.models[name]

    def _get_model_version_by_alias(self, name: str, alias: str) -> Any:
        if alias not in self._get_registered_model(name).aliases:
            raise MlflowException(f"Registered model alias {alias} not found.", INVALID_PARAMETER_VALUE)
        return self._get_model_version(name, self.models[name].aliases[alias])

    def _set_registered_model_tag(self, name: str, key: str, value: str) -> None:
        self._get_registered_model(name).tags[key] = value

    def _update_registered_model(self, name: str, description: str) -> None:
        self._get_registered_model(name).description = description

    def _set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
        self._get_model_version(name, version)
        model = self._get_registered_model(name)
        if model.aliases.get(alias) != version:
            model.aliases[alias] = version
            self.moved(alias, int(version))

    def _delete_registered_model_alias(self, name: str, alias: str) -> None:
        self._get_registered_model(name).aliases.pop(alias, None)

    def _set_model_version_tag(self, name: str, version: str, key: str, value: str) -> None:
        self._get_model_version(name, version).tags[key] = value

    def _update_model_version(self, name: str, version: str, description: str) -> None:
        self._get_model_version(name, version).description = description

    def _delete_model_version(self, name: str, version: str) -> None:
        aliases = [alias for alias, one in self.models[name].aliases.items() if one == version]
        require(not aliases, f"version {version} is removed and has the aliases {aliases}")
        if (name, version) not in self.versions:
            raise MlflowException("no such version", RESOURCE_DOES_NOT_EXIST)
        del self.versions[name, version]

    def _get_logged_model(self, number: str) -> Any:
        if number not in self.logged:
            raise MlflowException("no such model", RESOURCE_DOES_NOT_EXIST)
        return SimpleNamespace(artifact_location=number)

    def _delete_logged_model(self, number: str) -> None:
        if self.logged.pop(number, None) is None:
            raise MlflowException("no such model", RESOURCE_DOES_NOT_EXIST)

    # -- files --------------------------------------------------------------------------------------------------------

    def _download_artifacts(self, run_id: str, path: str, folder: str) -> str:
        if (run_id, path) not in self.files:
            raise MlflowException("no such file", RESOURCE_DOES_NOT_EXIST)
        (Path(folder) / Path(path).name).write_text(self.files[run_id, path], encoding="utf-8")
        return str(Path(folder) / Path(path).name)

    def _download_model(self, address: str, dst_path: str, tracking_uri: str) -> None:
        _, name, number, path = address.removeprefix("models:").split("/", 3)
        folder = Path(dst_path) / path
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in self.logged[self._get_model_version(name, number).model_id].items():
            (folder / file).write_bytes(content)

    def _list_model(self, address: str, tracking_uri: str) -> list[Any]:
        _, name, number, _ = address.removeprefix("models:").split("/", 3)
        return (
            [SimpleNamespace(path="artifacts/model")]
            if self.logged[self._get_model_version(name, number).model_id]
            else []
        )

    def is_whole(self, version: Any) -> bool:
        """Whether a version's files are those that its tag names."""
        hashes = json.loads(version.tags["files_sha256"])
        files = self.logged.get(version.model_id, {})
        return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()} == hashes


class Store:
    """The files of a logged model."""

    def __init__(self, server: Server, number: str) -> None:
        self.server, self.number = server, number

    def log_artifacts(self, folder: str) -> None:
        """Takes a file a request."""
        for path in sorted((Path(folder) / PACKED).iterdir()):
            self.log_artifact(str(path), PACKED)

    def log_artifact(self, path: str, _: str) -> None:
        """Takes a file."""
        name, content = Path(path).name, Path(path).read_bytes()
        self.server.call("log_artifact", lambda: self.server.logged[self.number].update({name: content}))

    def list_artifacts(self, part: str | None) -> list[Any]:
        """Lists the files of a folder with their sizes."""
        if part is None:
            return []
        files = self.server.call("list_artifacts", lambda: self.server.logged[self.number])
        return [SimpleNamespace(path=f"{part}/{name}", file_size=len(content)) for name, content in files.items()]

    def delete_artifacts(self) -> None:
        """Removes all files."""
        self.server.call("delete_artifacts", self.server.logged[self.number].clear)


def _field(version: Any, key: str) -> str | None:
    found = version.tags.get(key.removeprefix("tags.")) if key.startswith("tags.") else getattr(version, key)
    return None if found is None else str(found)
