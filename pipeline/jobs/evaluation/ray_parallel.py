"""Scores portions of the evaluation rows by Ray actors on the nodes of a cluster."""

import socket
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray
import torch
from ray.exceptions import RayError, RayTaskError
from safetensors.torch import load_file

from pipeline.errors import ConfigError, TrainingError
from pipeline.inference.files import MODEL, PLAN, WEIGHTS
from pipeline.inference.model import LoadedModel
from pipeline.jobs.console import one_line
from pipeline.jobs.evaluation.scorers import Comparison, PortionScorer, PortionSums
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.ray_executor import VARIABLES, count_room
from pipeline.preprocessing.transport.addresses import find_cluster
from pipeline.processes.build import Build, read_build, require_same
from pipeline.processes.ray_cluster import join_cluster
from pipeline.sealed import Letterbox, seal
from pipeline.training.config import TrainConfig
from storage.reader import Fragment
from storage.scratch import ScratchFolder

POLL_SECONDS = 1.0
CONNECT_SECONDS = 20.0
"""Ray itself tries for minutes."""
HERE = "or evaluate on this machine: training.launcher=processes preprocessing.executor=process"


class _SharedModel(NamedTuple):
    """A packed model in Ray's object store. Each node keeps one copy, which its processes share."""

    texts: dict[str, str]
    """Name -> content of the other files."""
    tensors: dict[str, Any]
    """Name -> reference."""

    def load(self) -> LoadedModel:
        """Loads the model. Its tables stay in the object store."""
        arrays = ray.get(list(self.tensors.values()))
        weights = dict(zip(self.tensors, map(torch.from_numpy, arrays), strict=True))
        with ScratchFolder("dlrm-model-") as folder:
            for name, text in self.texts.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            return LoadedModel(Path(folder), weights=weights)


def _read_model(folder: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Returns the texts and the tensors of a packed model."""
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in (MODEL, PLAN)}
    return texts, {name: tensor.numpy() for name, tensor in load_file(folder / WEIGHTS).items()}


def _share_model(texts: dict[str, str], tensors: Mapping[str, np.ndarray]) -> _SharedModel:
    return _SharedModel(texts, {name: ray.put(tensor) for name, tensor in tensors.items()})


@ray.remote
class _Scorer:
    """Scores portions in a process of a node."""

    def make_key(self) -> bytes:
        """Returns the key to seal secrets with."""
        self.letterbox = Letterbox()
        return self.letterbox.public

    def begin(self, key: bytes, content: bytes, models: Mapping[str, _SharedModel]) -> None:
        """Takes the comparison and the models. They are opened by the first portion, whose caller gets the error."""
        self.sealed, self.models = (key, content), models
        self.scorer: PortionScorer | None = None

    def score(self, fragments: Sequence[Fragment]) -> tuple[PortionSums, dict[str, bytes], str]:
        """Returns the sums of a portion, the files of the predictions that GAUC groups, and the node."""
        if self.scorer is None:
            pa.set_cpu_count(1)
            given = self.letterbox.open(self.sealed)
            require_same("the evaluation", Build.model_validate(given["build"]), {"scorer": read_build()})
            comparison = Comparison.model_validate(given["comparison"])
            self.scorer = PortionScorer(comparison, lambda folder: self.models[str(folder)].load())
        with ScratchFolder("dlrm-groups-") as folder:
            sums = self.scorer.score(fragments, Path(folder))
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        return sums, files, ray.get_runtime_context().get_node_id()


def score_on_cluster(
    workspace: Workspace, comparison: Comparison, portions: Sequence[Sequence[Fragment]]
) -> Generator[tuple[int, PortionSums]]:
    """Yields the number of each portion and its sums, in the order they finish. Leaves no actor behind.

    There is one actor for each processor that the cluster has for workers or, if these run elsewhere, for ranks.

    Raises:
        ConfigError: If the cluster does not answer.
        TrainingError: If it has no room for an actor, or too many were lost.
    """
    preprocessing, training = workspace.config.preprocessing, workspace.config.training
    assert preprocessing.ray_address is not None
    with _connection(preprocessing.ray_address):
        actors = _Actors(comparison, portions, preprocessing, training)
        try:
            yield from actors.score()
        finally:
            actors.kill()
    workspace.console.log.info("nodes of the Ray cluster that evaluated: %s", len(actors.nodes))


@contextmanager
def _connection(address: str) -> Iterator[None]:
    """Connects to the cluster, unless this process is connected."""
    if ray.is_initialized():
        yield
        return
    try:
        with suppress(ValueError), socket.create_connection(find_cluster(address), CONNECT_SECONDS):
            pass
        join_cluster(address, VARIABLES)
    except (OSError, RuntimeError) as error:  # Ray's ConnectionError is an OSError
        raise ConfigError(
            f"evaluation on preprocessing.ray_address '{address}'", "a Ray cluster that answers", one_line(error),
            f"Start it and run the command again, {HERE}.",
        ) from error  # fmt: skip
    try:
        yield
    finally:
        with suppress(Exception):  # an earlier error matters more
            ray.shutdown()


class _Actors:
    """Actors that take portions until all are scored.

    A lost actor's portion goes to another one. An actor that does not even start is not replaced. Ray cannot restart
    actors by itself: each needs the secrets anew.
    """

    def __init__(
        self,
        comparison: Comparison,
        portions: Sequence[Sequence[Fragment]],
        preprocessing: PreprocessingConfig,
        training: TrainConfig,
    ) -> None:
        self.groups, self.portions = comparison.groups, portions
        chosen = preprocessing if preprocessing.executor == "ray" else training
        self.resources, self.labels = dict(chosen.resources), dict(chosen.labels)
        self.attempts, self.patience = preprocessing.attempts, training.hang_seconds
        self.champion_error: str | None = None
        self.models = {
            str(path): _share_model(*_read_model(path)) for path in (comparison.model, comparison.exact) if path
        }
        if comparison.champion is not None:
            try:
                read = _read_model(comparison.champion)
            except Exception as error:  # a broken champion must not cost the new model
                self.champion_error = one_line(error)
                comparison = comparison.model_copy(update={"champion": None})
            else:
                self.models[str(comparison.champion)] = _share_model(*read)
        self.content = {"comparison": comparison.model_dump(mode="json"), "build": read_build().model_dump()}
        self.waiting = deque(range(len(portions)))
        self.calls: dict[Any, tuple[Any, int | None]] = {}
        """Answer -> its actor, and the portion that it scores. None: it is starting."""
        self.idle: list[Any] = []
        self.lost = Counter[int]()
        """Portion -> how many times it was lost."""
        self.nodes: set[str] = set()

    def score(self) -> Iterator[tuple[int, PortionSums]]:
        """Yields the number of each portion and its sums, in the order they finish."""
        room = count_room({"CPU": 1.0, **self.resources})
        for _ in range(min(max(room, 1), len(self.portions))):  # a cluster that grows on demand may have no node yet
            self._start()
        left, heard = len(self.portions), time.monotonic()
        while left:
            ready, _ = ray.wait(list(self.calls), timeout=POLL_SECONDS)
            if not ready:
                self._check_patience(time.monotonic() - heard)
                continue
            heard = time.monotonic()
            actor, number = self.calls.pop(ready[0])
            try:
                answer = ray.get(ready[0])
            except RayTaskError as error:
                raise error.cause from error
            except RayError as error:  # the process, its node, or the answer on that node is gone
                self._replace(actor, number, error)
                continue
            if number is None:
                actor.begin.remote(*seal(self.content, answer), self.models)
            else:
                (rows, evaluation, failed), files, node = answer
                self.nodes.add(node)
                for name, content in files.items():
                    self.groups.mkdir(parents=True, exist_ok=True)
                    (self.groups / name).write_bytes(content)
                left -= 1
                yield number, (rows, evaluation, failed or self.champion_error)
            self._assign(actor)

    def kill(self) -> None:
        """Ends all actors."""
        for actor in [*self.idle, *(actor for actor, _ in self.calls.values())]:
            with suppress(Exception):
                ray.kill(actor)

    def _start(self) -> None:
        actor = _Scorer.options(  # type: ignore[attr-defined]
            num_cpus=1, resources=self.resources, label_selector=self.labels or None, max_restarts=0, max_task_retries=0
        ).remote()
        self.calls[actor.make_key.remote()] = actor, None

    def _assign(self, actor: Any) -> None:
        """Gives an actor the next portion, or lets it wait for one that another actor loses."""
        if self.waiting:
            number = self.waiting.popleft()
            self.calls[actor.score.remote(self.portions[number])] = actor, number
        else:
            self.idle.append(actor)

    def _replace(self, actor: Any, number: int | None, error: RayError) -> None:
        """Gives the portion of a lost actor to another one."""
        with suppress(Exception):
            ray.kill(actor)
        if number is not None:
            self.waiting.appendleft(number)
            self.lost[number] += 1
            if self.idle:  # a new one might wait for the processor of this one
                self._assign(self.idle.pop())
            else:
                self._start()
        if not self.calls or (number is not None and self.lost[number] == self.attempts):
            raise TrainingError(
                "evaluation on the Ray cluster", "processes that last until they have scored their rows",
                one_line(error), f"See Ray's logs and the memory of the nodes, {HERE}.",
            ) from error  # fmt: skip

    def _check_patience(self, silent: float) -> None:
        at_work = any(number is not None for _, number in self.calls.values())
        if not at_work and self.patience is not None and silent > self.patience:
            needed = ", ".join(f"{name} {amount:g}" for name, amount in {"CPU": 1, **self.resources}.items())
            raise TrainingError(
                "evaluation on the Ray cluster", f"a node with room for a process ({needed})",
                f"none for {self.patience:g} seconds", f"Start nodes that have it, {HERE}.",
            )  # fmt: skip
