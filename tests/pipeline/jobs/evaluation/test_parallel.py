"""Portions of the evaluation rows have the same sums wherever they are scored."""

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

from models.config import DLRMConfig
from models.dlrm import DLRM
from pipeline.config import load
from pipeline.errors import ConfigError, ContractError, DataError, TrainingError
from pipeline.evaluation.config import EvaluationConfig
from pipeline.evaluation.evaluate import Evaluation
from pipeline.inference.model import LoadedModel
from pipeline.jobs.evaluation import parallel
from pipeline.jobs.evaluation.parallel import evaluate_portions
from pipeline.jobs.evaluation.scorers import Comparison, RowScorer
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.worker import Worker
from pipeline.processes.process import LOCAL_RAY
from pipeline.registration.register import pack
from storage.reader import DAY
from tests.ports import free_port

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: make setup EXTRAS=ray")
EVALUATION = EvaluationConfig(slices=("cat_user",), group_by="cat_user", small_slice_rows=0)


@pytest.fixture(scope="module")
def threads() -> Iterator[None]:
    """More threads here than a process of a cluster has."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def comparison(data: DataSpec, days: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """A model with rounded tables and a champion, both with layers wide enough for sums to depend on threads."""
    folder, config = (
        tmp_path_factory.mktemp("models"),
        DLRMConfig(embedding_width=4, bottom_mlp=(1024,), top_mlp=(1024,)),
    )

    def make(name: str, seed: int, form: Any = "fp32") -> Path:
        torch.manual_seed(seed)
        weights = folder / f"{seed}.safetensors"
        save_file(DLRM(config, len(data.plan.dense), data.plan.sparse).state_dict(), weights)
        return pack(folder / name, weights, data.plan, config, days[0].schema, form)

    return Comparison(
        spec=data.model_copy(update={"extra": ("cat_user", DAY)}), evaluation=EVALUATION, units=DAY,
        model=make("rounded", 1, "int8"), exact=make("exact", 1), champion=make("champion", 2), groups=folder / "groups",
    )  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without processors, and two nodes with one each."""
    pytest.importorskip("ray", reason="needs Ray: make setup EXTRAS=ray")
    from ray.cluster_utils import Cluster

    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setattr(parallel, "LEAST_CLUSTER_VALUES", 1)
    store = {"object_store_memory": 128 << 20}
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": dict(LOCAL_RAY), **store},
    )
    for name in ("one", "two"):
        made.add_node(num_cpus=1, resources={name: 1}, **store)
    yield made
    made.shutdown()
    patch.undo()


def evaluate(
    comparison: Comparison, on_progress: Callable[[int], object] = id, **overrides: Any
) -> tuple[Evaluation, str | None]:
    workspace = Workspace(
        load("configs/smoke.yaml", {key.replace("__", "."): value for key, value in overrides.items()})
    )
    fragments = Worker(comparison.spec).fragments()
    progress: Any = lambda what, done, total: on_progress(done)  # noqa: E731
    shutil.rmtree(comparison.groups, ignore_errors=True)  # of a test that made no report
    return evaluate_portions(workspace, comparison, fragments, sum(one.rows for one in fragments), progress)


def on(cluster: Any) -> dict[str, Any]:
    return {"training__launcher": "ray", "preprocessing__ray_address": cluster.address}


def sums(value: Any) -> Any:
    """All numbers of an evaluation, with their bits."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: sums(one) for key, one in value.items() if key != "grouped"}
    return sums(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, EvaluationConfig) else value


def actors() -> list[psutil.Process]:
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if "ray::_Scorer" in "".join(one.cmdline()):
                found.append(one)
    return found


def kill_actors() -> list[psutil.Process]:
    """Kills all actors and returns them."""
    killed = actors()
    for one in killed:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    return killed


def test_scores_do_not_depend_on_the_number_of_threads(comparison: Comparison) -> None:
    worker = Worker(comparison.spec)
    rows = worker.read_selected(worker.fragments()[0])
    before, found = torch.get_num_threads(), set()
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            found.add(RowScorer(LoadedModel(comparison.model)).score(rows).tobytes())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


@needs_ray
@pytest.mark.nightly
@pytest.mark.cluster
@pytest.mark.usefixtures("threads")
def test_nodes_of_a_cluster_evaluate_as_this_process_does(
    cluster: Any, comparison: Comparison, caplog: pytest.LogCaptureFixture
) -> None:
    """Bit for bit, although all processes are killed after the first portion. Nothing is left."""
    import ray

    caplog.set_level("INFO", "dlrm")
    seen: list[int] = []
    killed: list[psutil.Process] = []

    def kill(done: int) -> None:
        if not seen:
            killed.extend(kill_actors())
        seen.append(done)

    found, failed = evaluate(comparison, kill, **on(cluster))
    report = found.report()  # groups the predictions, and deletes them
    expected, _ = evaluate(comparison)
    assert failed is None
    assert sums(found) == sums(expected)
    assert report == expected.report()
    assert report.grouped is not None
    assert expected.model.sums[0, 0] == seen[-1] == 2_481
    assert len(seen) == 26, "a portion is a row group"
    assert killed
    assert "nodes of the Ray cluster that evaluated: " in caplog.text
    assert not ray.is_initialized()
    assert not psutil.wait_procs(actors(), timeout=30)[1]


@needs_ray
@pytest.mark.nightly
@pytest.mark.cluster
def test_errors_of_nodes_arrive_unchanged(cluster: Any, comparison: Comparison) -> None:
    wrong = comparison.model_copy(update={"spec": comparison.spec.model_copy(update={"label": "row"})})
    with pytest.raises(DataError) as caught:
        evaluate(wrong, **on(cluster))
    with pytest.raises(DataError) as expected:
        evaluate(wrong)
    assert str(caught.value).partition(":")[0] == str(expected.value).partition(":")[0]
    assert not psutil.wait_procs(actors(), timeout=30)[1]


@needs_ray
@pytest.mark.nightly
@pytest.mark.cluster
def test_a_broken_champion_does_not_cost_the_model(cluster: Any, comparison: Comparison, tmp_path: Path) -> None:
    broken = pack_copy(comparison, tmp_path)
    found, failed = evaluate(broken, **on(cluster))
    expected, reason = evaluate(broken)
    assert failed == reason is not None
    assert sums(found) == sums(expected)


def pack_copy(comparison: Comparison, folder: Path) -> Comparison:
    assert comparison.champion is not None
    for path in comparison.champion.iterdir():
        content = path.read_bytes()
        (folder / path.name).write_bytes(content[: len(content) // 2] if path.suffix == ".safetensors" else content)
    return comparison.model_copy(update={"champion": folder})


@needs_ray
@pytest.mark.nightly
@pytest.mark.cluster
def test_a_process_that_always_dies_ends_the_evaluation(cluster: Any, comparison: Comparison) -> None:
    with pytest.raises(TrainingError) as caught:
        evaluate(comparison, lambda done: kill_actors(), preprocessing__attempts=1, **on(cluster))
    assert str(caught.value).startswith(
        "evaluation on the Ray cluster: expected processes that last until they have scored their rows, got ActorDied"
    )


@needs_ray
@pytest.mark.nightly
@pytest.mark.cluster
def test_a_cluster_without_room_or_answer_is_named(cluster: Any, comparison: Comparison) -> None:
    nowhere = on(cluster) | {"training__resources": {"nowhere": 1}, "training__hang_seconds": 1}
    for overrides, kind, sentence in (
        (
            nowhere, TrainingError,
            "evaluation on the Ray cluster: expected a node with room for a process (CPU 1, nowhere 1), got none for 1 "
            "seconds. Start nodes that have it, or evaluate on this machine: training.launcher=processes "
            "preprocessing.executor=process.",
        ),
        (
            on(cluster) | {"preprocessing__ray_address": f"127.0.0.1:{free_port()}"}, ConfigError,
            "a Ray cluster that answers, got ConnectionRefusedError: [Errno 111] Connection refused. Start it and run the "
            "command again, or evaluate on this machine: training.launcher=processes preprocessing.executor=process.",
        ),
    ):  # fmt: skip
        caught: pytest.ExceptionInfo[ContractError]
        with pytest.raises(kind) as caught:
            evaluate(comparison, **overrides)
        assert str(caught.value).endswith(sentence)
