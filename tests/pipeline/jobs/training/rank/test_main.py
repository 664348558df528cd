"""Whole trainings by real ranks. The result does not depend on sharding, number of ranks, or ranks that are killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
import torch
import torch.distributed.checkpoint as dcp
from llvmlite.binding import get_host_cpu_name
from torch.distributed.checkpoint.filesystem import FileSystemReader

from models.dlrm import DLRM
from pipeline.errors import ConfigError, ContractError, TrainingError
from pipeline.jobs.code_version import read_code
from pipeline.jobs.training.rank import main
from pipeline.jobs.training.rank.model import build_model
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.service import Service
from pipeline.preprocessing.worker import Worker
from pipeline.processes.build import read_build
from pipeline.training.launch.processes import Event, Limits, run_ranks
from pipeline.training.state import checkpoint
from storage.warehouse import Warehouse
from tests.digest import hash_weights
from tests.pipeline.bags import sparse_tensor
from tests.pipeline.conftest import ROOT, SETTINGS, Run, completed, completed_here, start
from tests.pipeline.jobs.training.odd_rank import Reload, reload

ODD_RANK = "tests.pipeline.jobs.training.odd_rank"


@pytest.mark.slow
def test_ids_sent_ahead_change_no_bit(rank_spec: Callable[..., RankSpec], tmp_path: Path) -> None:
    """Also across validations and the end of an epoch, and if training ends before the batch that was sent."""
    settings = SETTINGS | {"max_steps": 17, "epochs": 2}
    ahead = completed(rank_spec(tmp_path / "ahead", **settings, send_ids_ahead=True))
    plain = completed(rank_spec(tmp_path / "plain", **settings))
    check_alike(ahead, plain)


def test_ids_sent_ahead_of_tables_cut_by_rows(by_rows: Run, rank_spec: Callable[..., RankSpec], tmp_path: Path) -> None:
    """The lengths that means are divided by travel with the ids. Training ends with the last batch."""
    check_alike(completed(rank_spec(tmp_path, **SETTINGS, sharding="row_wise", send_ids_ahead=True)), by_rows)


GOLDEN = {
    ("2.13.0+cpu", "znver3"): "2e933e1489638c116722d7abaf25c18abc991ebd514e0584206bfb4959162887",
    ("2.13.0+cpu", "icelake-server"): "7eb17de13a7ac8532906816cba7edaf97350ba29c68322bc4769ed795481c519",
}
"""torch and processor -> the hash of the weights that they make of the test's rows."""


def test_no_change_makes_other_weights_unseen(alone: Run) -> None:
    """Golden bits. Matrix products add in another order on other processors."""
    here = (torch.__version__, get_host_cpu_name())
    if here not in GOLDEN or os.environ["DLRM_TEST_DEVICE"] != "cpu":
        pytest.skip(f"no golden weights for {here}")
    assert GOLDEN[here] == alone.result["weights_sha256"], (
        "A training makes other weights than before. If that is meant, enter the hash here and say so in CHANGELOG.md."
    )


def test_a_host_without_the_folder_of_the_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        main.main(str(tmp_path / "spec.json"))
    assert str(caught.value) == (
        f"ranks of '{tmp_path}/spec.json': expected a folder that their hosts share with the training, got no such file "
        "on this host. Share `home` among the hosts, or set training.launcher=ray, which needs no common folder."
    )


def check_alike(found: Run, expected: Run) -> None:
    assert found.result["weights_sha256"] == expected.result["weights_sha256"]
    assert found.metric("train_ne_window") == expected.metric("train_ne_window")
    assert found.metric("valid_ne") == expected.metric("valid_ne")


@pytest.fixture(scope="session")
def by_rows(rank_spec: Callable[..., RankSpec], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks. Each table is cut in two."""
    return completed(rank_spec(tmp_path_factory.mktemp("by_rows"), **SETTINGS, sharding="row_wise"))


@pytest.fixture(scope="session")
def alone(rank_spec: Callable[..., RankSpec], device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One rank, in this process."""
    return completed_here(rank_spec(tmp_path_factory.mktemp("alone"), **SETTINGS | {"world_size": 1}), device)


def ranks_below(process: psutil.Process) -> dict[int, psutil.Process]:
    """Returns rank -> process."""
    found = [(child.name(), child) for child in process.children(recursive=True)]
    return {int(name.split()[-1]): child for name, child in found if name.startswith("dlrm rank ")}


def at_step(step: int, number: int, what: int) -> Callable[[Event], None]:
    """Returns a handler that sends a signal to a rank after the metrics of a step."""

    def handle(event: Event) -> None:
        if event["event"] == "metrics" and event["step"] == step:
            ranks_below(psutil.Process())[number].send_signal(what)

    return handle


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def close(a: Run, b: Run) -> None:
    assert a.weights.keys() == b.weights.keys()
    for name, value in a.weights.items():
        torch.testing.assert_close(b.weights[name], value, atol=1e-4, rtol=0.0)
    for name in ("valid_ne", "train_ne_progressive", "train_ne_window"):
        assert b.metric(name) == pytest.approx(a.metric(name), abs=1e-4)


def test_result_of_a_training(undisturbed: Run) -> None:
    result = undisturbed.result
    assert (result["steps"], result["rows"], result["world_size"]) == (14, 2081, 2)
    assert result["valid_ne"] == min(undisturbed.metric("valid_ne").values())
    assert undisturbed.metric("valid_ne")[result["best_step"]] == result["valid_ne"]
    assert result["weights_sha256"] == hash_weights(undisturbed.weights)
    assert result["ne_progressive"] < undisturbed.metric("train_ne_progressive")[2]
    first, second = undisturbed.begun["plan"]
    assert {first["sharding"], second["sharding"]} == {"table_wise"}
    assert sorted(first["ranks"] + second["ranks"]) == [0, 1]
    assert sorted(path.name for path in (undisturbed.folder / "checkpoints").iterdir()) == [
        "best", "step-0000000012", "step-0000000014",
    ]  # fmt: skip


def test_exported_weights_are_the_best_ones(undisturbed: Run) -> None:
    stored = read_all(undisturbed.folder / "checkpoints" / "best")
    for name, value in undisturbed.weights.items():
        assert stored[f"model/{name}"].equal(value)
    assert (
        checkpoint.read_progress(undisturbed.folder / "checkpoints" / "best")["steps"]
        == undisturbed.result["best_step"]
    )


def test_two_ranks_equal_one(undisturbed: Run, alone: Run) -> None:
    close(alone, undisturbed)


def test_ranks_say_which_code_they_run(alone: Run) -> None:
    assert alone.begun["code"] == read_code().model_dump()
    assert alone.result["builds"] == [read_build().model_dump()]


@pytest.mark.slow
def test_row_wise_equals_table_wise(by_rows: Run, alone: Run) -> None:
    assert {row["sharding"] for row in by_rows.begun["plan"]} == {"row_wise"}
    close(alone, by_rows)


def test_probe_is_what_the_model_says_of_the_first_rows(undisturbed: Run, alone: Run) -> None:
    spec = undisturbed.spec
    model = DLRM(spec.model, len(spec.probe.plan.dense), spec.probe.plan.sparse)
    model.load_state_dict(undisturbed.weights)
    worker = Worker(spec.probe, Warehouse(spec.probe.warehouse, Path(spec.probe.home)))
    parts = [spec.probe.plan.apply(worker.read_selected(fragment)) for fragment in worker.fragments()]
    with torch.no_grad():
        expected = torch.cat(
            [model(torch.from_numpy(p.dense), sparse_tensor(model.names, p.sparse)).sigmoid() for p in parts]
        )
    for run in (undisturbed, alone):
        probe = json.loads((run.folder / "probe.json").read_text())
        assert len(probe) == 256
        assert probe == pytest.approx(expected[:256].tolist(), abs=1e-4)


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """(spec, deaths, **limits) -> a training in which ranks die at a step, or while a checkpoint is saved."""

    def train(spec: RankSpec, deaths: list[list[Any]], **limits: Any) -> Run:
        monkeypatch.setenv("DEATHS", json.dumps(deaths))
        events: list[Event] = []
        limit = Limits(**{"deadline_seconds": 250, "restart_limit": 3, **limits})
        result = run_ranks(ODD_RANK, spec, Path(spec.folder), 2, 1, limit, events.append, ROOT)
        return Run(spec, result, events)

    return train


def check_restarted(run: Run, undisturbed: Run, deaths: list[str], resumed: list[int]) -> None:
    restarts = [event["reason"].split(": ")[1] for event in run.events if event["event"] == "restart"]
    assert restarts == deaths
    assert [event["step"] for event in run.events if event["event"] == "resumed"] == resumed
    assert run.result["restarts"] == len(deaths)
    assert run.result["weights_sha256"] == undisturbed.result["weights_sha256"]
    assert run.result["valid_ne"] == undisturbed.result["valid_ne"]
    assert not [path for path in run.folder.rglob(".*") if path.name != ".metadata"]
    assert not ranks_below(psutil.Process())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("difference", [{"sources": "other"}, {"lock": "other"}, {"versions": {"python": "3.9"}}])
def test_ranks_with_other_code_or_packages_end_before_the_first_step(
    rank_spec: Callable[..., RankSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, difference: dict[str, Any]
) -> None:
    monkeypatch.setenv("BUILDS", json.dumps({"1": {"host": "two", **difference}}))
    events: list[Event] = []
    limits = Limits(deadline_seconds=250, restart_limit=0)
    spec = rank_spec(tmp_path, **SETTINGS | {"world_size": 2})
    with pytest.raises(ConfigError, match=r"^rank 1 on host two: expected the code and packages of rank 0 on host "):
        run_ranks(ODD_RANK, spec, tmp_path, 2, 1, limits, events.append, ROOT)
    assert not {"start", "metrics"}.intersection(event["event"] for event in events)


def test_a_rank_with_other_code_than_its_training_ends(rank_spec: Callable[..., RankSpec], tmp_path: Path) -> None:
    """Where somebody else starts the ranks, all of them may lie in another checkout."""
    spec = rank_spec(tmp_path, **SETTINGS)
    other = read_build().model_copy(update={"sources": "other", "host": "one"})
    with pytest.raises(
        ConfigError, match=r"^rank 0 on host .*: expected the code and packages of the training on host "
    ):
        main.train(spec.model_copy(update={"build": other}), 0, torch.device("cpu"), print)


@pytest.mark.slow
def test_a_killed_rank_restarts_with_the_same_service(
    rank_spec: Callable[..., RankSpec],
    undisturbed: Run,
    dying: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The service keeps running. Ranks of the next attempt get batches from the checkpoint on, and no older ones."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    spec = rank_spec(tmp_path / "run", **SETTINGS, checkpoint_async=False)
    assert spec.valid is not None
    with Service({"train": spec.train, "valid": spec.valid}, spec.preprocessing, tmp_path / "service") as service:
        spec = spec.model_copy(update={"service": service.address})
        run = dying(spec, [[0, 1, "train_step", "step 6;", "SIGKILL"]])
    check_restarted(run, undisturbed, ["SIGKILL"], [4])
    assert [event["step"] for event in run.events if event["event"] == "saved"] == [4, 8, 12, 14]
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.nightly
def test_ranks_die_in_every_way(
    rank_spec: Callable[..., RankSpec], undisturbed: Run, dying: Callable[..., Run], tmp_path: Path
) -> None:
    deaths = [
        [0, 0, "train_step", "step 2;", "SIGTERM"],
        [1, 1, "train_step", "step 9;", "exit 137"],
        [2, 1, "train_step", "step 12;", "SIGSTOP"],
    ]
    spec = rank_spec(tmp_path / "run", **SETTINGS, checkpoint_async=False)
    run = dying(spec, deaths, hang_seconds=25, deadline_seconds=500)
    check_restarted(run, undisturbed, ["SIGTERM", "exit code 137", "none while rank 0 was training"], [8, 12])


@pytest.mark.nightly
def test_killed_while_a_checkpoint_is_saved(
    rank_spec: Callable[..., RankSpec], undisturbed: Run, dying: Callable[..., Run], tmp_path: Path
) -> None:
    """Before its manifest, after it, and right after the folder is renamed."""
    deaths = [
        [0, 0, "write_json", ".step-0000000008.tmp/manifest.json", "SIGKILL"],
        [1, 0, "seal_folder", ".step-0000000008.tmp", "SIGKILL"],
        [2, 0, "after seal_folder", ".step-0000000008.tmp", "SIGKILL"],
    ]
    spec = rank_spec(tmp_path / "run", **SETTINGS)
    check_restarted(dying(spec, deaths), undisturbed, ["SIGKILL"] * 3, [4, 4, 8])


@pytest.mark.nightly
def test_one_rank_finds_nan_and_all_skip_the_batch(
    rank_spec: Callable[..., RankSpec], dying: Callable[..., Run], tmp_path: Path
) -> None:
    """Tables and dense weights stay as they were after the previous batch."""
    settings = SETTINGS | {"on_nonfinite": "skip", "max_steps": 7, "validate_every_steps": None}
    poisoned = [[0, 1, "train_step", "step 6;", "nan"]]
    run = dying(rank_spec(tmp_path / "run", **settings | {"checkpoint_every_steps": 6}), poisoned)
    assert (run.result["steps"], run.result["skipped_batches"]) == (7, 1)
    before = read_all(run.folder / "checkpoints" / "step-0000000006")
    check_equal({f"model/{name}": value for name, value in run.weights.items()}, only_model(before))


@pytest.mark.nightly
def test_a_nan_loss_ends_all_ranks_at_once(
    rank_spec: Callable[..., RankSpec], dying: Callable[..., Run], tmp_path: Path
) -> None:
    """This is the default, without another attempt. Earlier checkpoints are whole and finite."""
    with pytest.raises(ContractError, match=r"^loss at step 7: expected a finite number, got nan\. Clamp"):
        dying(rank_spec(tmp_path / "run", **SETTINGS), [[0, 1, "train_step", "step 6;", "nan"]])
    folder = checkpoint.find_latest(tmp_path / "run" / "checkpoints")
    assert folder is not None
    assert folder.name == "step-0000000004"
    assert all(value.isfinite().all() for value in read_all(folder).values())
    assert not (tmp_path / "run" / "weights.safetensors").exists()


def killed_and_resumed(spec: RankSpec, number: int, step: int) -> tuple[Run, list[psutil.Process]]:
    """Returns the attempt after the killed one, and the ranks of the killed one."""
    seen: list[psutil.Process] = []

    def handle(event: Event) -> None:
        if event["event"] == "start":
            seen.extend(ranks_below(psutil.Process()).values())
        at_step(step, number, signal.SIGKILL)(event)

    with pytest.raises(TrainingError, match=r"^rank \d: expected to train to the end, got "):
        start(spec, handle)
    assert len(seen) == spec.training.world_size
    assert not any(process.is_running() for process in seen)
    return completed(spec), seen


def check_same(run: Run, undisturbed: Run, resumed_at: int) -> None:
    assert run.result["weights_sha256"] == undisturbed.result["weights_sha256"]
    assert run.result["ne_progressive"] == pytest.approx(undisturbed.result["ne_progressive"], rel=1e-12)
    assert run.result["valid_ne"] == undisturbed.result["valid_ne"]
    resumed = [event["step"] for event in run.events if event["event"] == "resumed"]
    assert resumed == ([resumed_at] if resumed_at else [])
    assert not list(run.folder.rglob("*.tmp"))


@pytest.mark.slow
def test_killed_rank_resumes_to_the_same_bits(
    rank_spec: Callable[..., RankSpec], undisturbed: Run, tmp_path: Path
) -> None:
    """The same command runs again."""
    run, _ = killed_and_resumed(rank_spec(tmp_path, **SETTINGS, checkpoint_async=False), number=1, step=6)
    check_same(run, undisturbed, resumed_at=4)


LANES = {"lanes": 4, "average_from_step": 5, "average_every_steps": 2}


@pytest.fixture(scope="module")
def in_lanes(rank_spec: Callable[..., RankSpec], device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One rank with four lanes, in this process."""
    folder = tmp_path_factory.mktemp("in_lanes")
    return completed_here(rank_spec(folder, **SETTINGS | LANES | {"world_size": 1}), device)


def test_lanes_give_every_number_of_ranks_the_same_bits(
    rank_spec: Callable[..., RankSpec], in_lanes: Run, tmp_path: Path
) -> None:
    """Weights, losses and validations. The last batch of the epoch is a single row."""
    check_alike(completed(rank_spec(tmp_path, **SETTINGS | LANES)), in_lanes)


@pytest.mark.nightly
def test_a_killed_training_in_lanes_resumes_with_fewer_ranks(
    rank_spec: Callable[..., RankSpec], in_lanes: Run, device: torch.device, tmp_path: Path
) -> None:
    """Two ranks are killed, and one goes on from their checkpoint."""
    spec = rank_spec(tmp_path, **SETTINGS | LANES, checkpoint_async=False)
    with pytest.raises(TrainingError, match=r"^rank \d: expected to train to the end, got "):
        start(spec, at_step(6, 1, signal.SIGKILL), restart_limit=0)
    fewer = rank_spec(tmp_path, **SETTINGS | LANES | {"world_size": 1})
    check_same(completed_here(fewer, device), in_lanes, resumed_at=4)


@pytest.mark.nightly
def test_damaged_checkpoints_are_skipped(rank_spec: Callable[..., RankSpec], undisturbed: Run, tmp_path: Path) -> None:
    """The newest has a flipped bit, and the one before is whole. There is also an interrupted save."""
    spec = rank_spec(tmp_path, **SETTINGS)
    shutil.copytree(undisturbed.folder / "checkpoints", tmp_path / "checkpoints")
    shutil.copytree(tmp_path / "checkpoints" / "step-0000000012", tmp_path / "checkpoints" / ".step-0000000013.tmp")
    shard = tmp_path / "checkpoints" / "step-0000000014" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    run = completed(spec)
    [damaged] = [event["error"] for event in run.events if event["event"] == "damaged"]
    assert damaged.startswith("checkpoint 'step-0000000014': expected sha256 ")
    assert not (tmp_path / "checkpoints" / ".step-0000000013.tmp").exists()
    assert [event["step"] for event in run.events if event["event"] == "resumed"] == [12]
    assert run.result["weights_sha256"] == undisturbed.result["weights_sha256"]


@pytest.mark.nightly
def test_a_finished_training_exports_under_any_sharding_plan(
    rank_spec: Callable[..., RankSpec], undisturbed: Run, device: torch.device, tmp_path: Path
) -> None:
    """Run again, it only exports: from two table-wise ranks to one rank, and to two row-wise ranks."""
    for folder in ("one", "rows"):
        shutil.copytree(undisturbed.folder / "checkpoints", tmp_path / folder / "checkpoints")
    one = completed_here(rank_spec(tmp_path / "one", **SETTINGS | {"world_size": 1}), device)
    rows = completed(rank_spec(tmp_path / "rows", **SETTINGS, sharding="row_wise"))
    for run in (one, rows):
        assert run.result["weights_sha256"] == undisturbed.result["weights_sha256"]


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Reads all tensors of a checkpoint with DCP's own reader."""
    entries = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(tensors, storage_reader=FileSystemReader(str(folder)), no_dist=True)
    return tensors


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("world_size", "shardings"),
    [(1, ["table_wise"]), (2, ["row_wise", "data_parallel", "column_wise"]), (4, ["row_wise"])],
)
def test_state_is_equal_under_every_sharding_plan(
    rank_spec: Callable[..., RankSpec],
    undisturbed: Run,
    by_rows: Run,
    alone: Run,
    by_numbers: Run,
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    shardings: list[str],
) -> None:
    """Weights and optimizer state from checkpoints of one rank and of two, table-wise and row-wise; and initial weights."""
    reloads = []
    for sharding in shardings:
        settings = {"world_size": world_size, "sharding": sharding}
        if sharding == "column_wise":  # row-wise Adagrad would have a moment for each part of a row
            spec = wider(rank_spec(tmp_path / sharding, **settings, table_optimizer="adagrad"))
            runs = {"by_numbers": by_numbers}
        else:
            spec = rank_spec(tmp_path / sharding, **settings)
            runs = {"table_wise": undisturbed, "row_wise": by_rows, "alone": alone}
        sources = {name: run.folder / "checkpoints" / "step-0000000014" for name, run in runs.items()}
        reloads.append(Reload(spec=spec, sources=sources))
    if world_size == 1:
        reload(reloads[0], 1, device)
    else:
        monkeypatch.setenv("RELOADS", json.dumps([each.model_dump_json() for each in reloads]))
        run_ranks(ODD_RANK, reloads[0].spec, tmp_path, world_size, 1, Limits(deadline_seconds=250), print, ROOT)
    for each in reloads:
        for name, path in each.sources.items():
            expected = read_all(path)
            assert {key.split("/")[0] for key in expected} == {"model", "tables", "dense"}
            check_equal(read_all(Path(each.spec.folder) / name), expected)
        model, _ = build_model(each.spec.model_copy(update={"training": alone.spec.training}), 1, device)
        initial = {f"model/{name}": value for name, value in (checkpoint.full_state(model.state_dict()) or {}).items()}
        check_equal(only_model(read_all(Path(each.spec.folder) / "initial")), initial)


@pytest.fixture(scope="session")
def by_numbers(
    rank_spec: Callable[..., RankSpec], device: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """One rank with wider vectors and a moment for each number."""
    settings = SETTINGS | {"world_size": 1, "table_optimizer": "adagrad"}
    return completed_here(wider(rank_spec(tmp_path_factory.mktemp("by_numbers"), **settings)), device)


def wider(spec: RankSpec) -> RankSpec:
    """Returns the spec with vectors that can be cut in two."""
    return spec.model_copy(update={"model": spec.model.model_copy(update={"embedding_width": 8})})


def only_model(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in stored.items() if name.startswith("model/")}


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].equal(value), name


def test_another_hash_size_is_refused_by_name(
    rank_spec: Callable[..., RankSpec], undisturbed: Run, device: torch.device, tmp_path: Path
) -> None:
    shutil.copytree(undisturbed.folder / "checkpoints", tmp_path / "checkpoints")
    plan = undisturbed.spec.train.plan
    smaller = plan.model_copy(
        update={
            "ops": tuple(op.model_copy(update={"size": 80}) if op.kind == "sigrid_hash" else op for op in plan.ops),
            "sparse": tuple(replace(f, rows=80) if f.name == "list_items" else f for f in plan.sparse),
        }
    )
    spec = rank_spec(tmp_path, **SETTINGS | {"world_size": 1})
    parts = {name: getattr(spec, name).model_copy(update={"plan": smaller}) for name in ("train", "valid", "probe")}
    with pytest.raises(ContractError) as caught:
        completed_here(spec.model_copy(update=parts), device)
    assert str(caught.value) == (
        "checkpoint 'step-0000000014', tensor 'model/embeddings.embedding_bags.list_items.weight': "
        "expected shape (80, 4), got (83, 4). "
        "Train with the configuration that wrote it, or start again: force=true (flows.recurring: scratch=true)."
    )


@pytest.mark.nightly
def test_a_data_error_of_a_rank_reaches_the_launcher(
    rank_spec: Callable[..., RankSpec],
    days: list[Any],
    make_warehouse: Callable[..., DataSpec],
    tmp_path: Path,
) -> None:
    spoilt = days[0].set_column(
        days[0].schema.get_field_index("label"),
        "label",
        pa.array([7 if i == 600 else 0 for i in range(days[0].num_rows)]),
    )
    data = make_warehouse(tmp_path / "warehouse", [spoilt])
    spec = rank_spec(tmp_path / "run", world_size=2).model_copy(update={"train": data, "valid": None, "probe": data})
    with pytest.raises(ContractError) as caught:
        start(spec, print)
    assert caught.value.where.startswith("label 'label' in row group 0 of file '")
    assert (caught.value.expected, caught.value.actual, caught.value.remedy) == (
        "0 or 1",
        "7",
        "Correct the source and ingest the day with force=true.",
    )


LAUNCHER = """
import sys
from pathlib import Path
from pydantic import BaseModel
from pipeline.training.launch.processes import (Limits, run_ranks)
class Spec(BaseModel, extra="allow"):
    folder: Path
spec = Spec.model_validate_json(Path(sys.argv[1]).read_text())
def show(event):
    print(event["event"], flush=True)
run_ranks("pipeline.jobs.training.rank.main", spec, spec.folder, 2, 1, Limits(), show, Path.cwd())
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["as the ranks start", "as they train"])
def test_no_rank_outlives_its_launcher(rank_spec: Callable[..., RankSpec], tmp_path: Path, when: str) -> None:
    spec = rank_spec(tmp_path, **SETTINGS, epochs=1000)
    (tmp_path / "given.json").write_text(spec.model_dump_json())
    command = [sys.executable, "-W", "ignore", "-c", LAUNCHER, str(tmp_path / "given.json")]
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        try:
            if when == "as they train":
                while launcher.stdout.readline() != "metrics\n":
                    assert launcher.poll() is None
            limit = time.monotonic() + 240
            while len(ranks := ranks_below(psutil.Process(launcher.pid))) < 2:
                assert time.monotonic() < limit
                time.sleep(0.05)
        finally:
            launcher.kill()
    assert gone(list(ranks.values()), seconds=15 if when == "as they train" else 60)
