"""Composition root of a rank process: builds client, model and trainer, and connects them.

A spawned process cannot be given an iterator, so it builds its batches itself.
"""

import importlib
import logging
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.errors import ContractError, to_wire
from pipeline.jobs.code_version import read_code
from pipeline.jobs.training.rank.group import gather_builds, open_event_writer, run_rank, start_group
from pipeline.jobs.training.rank.model import add_sharding_plan, build_model, keep_batches, measure_uses, open_client
from pipeline.jobs.training.rank.spec import PROBE, SERVICE_FOLDER, WEIGHTS, RankSpec
from pipeline.jobs.training.rank.start import make_restore, open_store
from pipeline.preprocessing.client import BatchSource, Client, InlineSource, open_remote_source
from pipeline.preprocessing.dataset import count_rows
from pipeline.processes.build import read_build, require_same
from pipeline.training.config import TrainConfig
from pipeline.training.dense import lacks_bf16
from pipeline.training.launch.external import append_events
from pipeline.training.launch.heartbeat import Heartbeat
from pipeline.training.launch.processes import ANSWER, ERROR
from pipeline.training.metrics import evaluate_sums
from pipeline.training.optim import TABLES
from pipeline.training.restore import Emit
from pipeline.training.state.checkpoint import local_parts
from pipeline.training.state.progress import LossSums, TrainingProgress
from pipeline.training.trainer import Trainer, TrainingData
from storage.artifacts import atomic_file, write_json, write_text
from storage.compiled import load_compiler
from storage.warehouse import Warehouse

PROBE_ROWS = 256
"""Rows whose probabilities the trainer writes. The registered model must reproduce them."""


def main(path: str) -> None:
    """Trains as one rank of a group.

    Args:
        path: File with the spec as JSON.
    """
    read_code(), read_build()  # unless the server of the ranks has
    run_rank(path, RankSpec, train)


def plan(path: str) -> None:
    """Makes the sharding plan of a training. Writes the plan, or the error, next to the spec for the launcher.

    Args:
        path: File with the spec as JSON.
    """
    spec = RankSpec.model_validate_json(Path(path).read_text(encoding="utf-8"))
    logging.disable(logging.WARNING)
    folder = Path(path).parent
    try:
        placed = add_sharding_plan(spec, measure_uses(spec))
    except ContractError as error:
        write_json(folder / ERROR, to_wire(error))
        raise
    write_text(folder / ANSWER, placed.model_dump_json(include={"placement"}))


def join(text: str, emit: Emit) -> None:
    """Trains as one rank of a group that exists already.

    Args:
        text: The spec as JSON.
        emit: Takes the events.
    """
    read_code(), read_build()
    spec = RankSpec.model_validate_json(text)
    logging.disable(logging.WARNING)
    rank = dist.get_rank()
    device = start_group(spec.training, rank)
    train(fit_group(spec, emit), rank, device, emit)


def fit_group(spec: RankSpec, emit: Emit) -> RankSpec:
    """Returns the spec for the ranks that there are. If they are fewer than planned for, rank 0 plans their tables."""
    there, wanted = dist.get_world_size(), spec.training.world_size
    if there == wanted:
        return spec
    emit({"event": "warning", "text": f"the cluster has no room for {wanted} ranks: training continues with {there}"})
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"world_size": there})})
    plans = [add_sharding_plan(spec, measure_uses(spec)).placement if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(plans)
    return spec.model_copy(update={"placement": plans[0]})


def train(spec: RankSpec, rank: int, device: torch.device, emit: Emit | None = None) -> None:
    """Trains one rank: builds the trainer, trains, and exports the weights."""
    if spec.build is not None:
        require_same("the training", spec.build, {f"rank {rank}": read_build()})
    followed = spec.training.launcher == "external"
    emit = emit or (append_events(Path(spec.folder), rank) if followed else open_event_writer())
    heartbeat = Heartbeat(emit)
    trainer = assemble(spec, rank, device, emit, heartbeat)
    started = time.perf_counter()
    progress = trainer.train()
    seconds = time.perf_counter() - started
    heartbeat.report("exporting")
    by_rank, builds = gather_stats(trainer, device), gather_builds()
    probe = predict_probe(spec, trainer.model, rank, device)
    if rank > 0:
        trainer.learner.export(None, heartbeat.progress)
        return
    folder, store = Path(spec.folder), open_store(spec, heartbeat)
    with atomic_file(folder / WEIGHTS) as temporary:
        weights_sha256 = trainer.learner.export(temporary, heartbeat.progress)
    write_json(folder / PROBE, probe)
    if store is not None:
        for name in (WEIGHTS, PROBE):
            store.put(folder / name, name)
    emit(
        make_result(progress, device)
        | by_rank
        | {
            "builds": [build.model_dump() for build in builds],
            "seconds": seconds,
            "checkpoint_blocked_seconds": trainer.checkpointer.blocked_seconds,
            "weights_sha256": weights_sha256,
        }
    )


def count_steps(spec: RankSpec) -> TrainConfig:
    """Returns the settings with all spans in steps."""
    if not spec.training.counts_epochs:
        return spec.training
    rows = spec.train.rows
    if rows is None:
        rows = count_rows(spec.train, Warehouse(spec.train.warehouse, Path(spec.train.home)))
    return spec.training.in_steps(rows)


def assemble(spec: RankSpec, rank: int, device: torch.device, emit: Emit, heartbeat: Heartbeat) -> Trainer:
    """Builds the trainer with its model, its batches and its validation."""
    model, plan_rows = build_model(spec, dist.get_world_size(), device)
    emit({"event": "start", "plan": plan_rows, "device": device.type, "code": read_code().model_dump()})
    if device.type == "cpu" and spec.training.dense_precision == "bf16" and lacks_bf16(torch.cpu.get_capabilities()):
        slow = "training.dense_precision=bf16 is slow here: PyTorch has no fast bf16 for this processor. Set fp32."
        emit({"event": "warning", "text": slow})
    data = open_data(spec, rank, device, emit, heartbeat)
    training, restore = count_steps(spec), make_restore(spec, emit, heartbeat)
    Path(spec.folder).mkdir(parents=True, exist_ok=True)  # on a host of its own
    return Trainer(model, training, data, restore, emit, spec.seed, device)


def open_data(spec: RankSpec, rank: int, device: torch.device, emit: Emit, heartbeat: Heartbeat) -> TrainingData:
    """Opens the batches of a rank: from the service, or read by the rank itself."""
    source: BatchSource
    if spec.service is not None:
        source = open_remote_source(spec.service, spec.preprocessing.connections)
    else:
        data = {"train": spec.train} | ({"valid": spec.valid} if spec.valid is not None else {})
        folder = Path(spec.folder) / SERVICE_FOLDER if dist.get_world_size() == 1 else None
        source = InlineSource(data, spec.preprocessing, folder, lambda text: emit({"event": "warning", "text": text}))
    reader = open_client(spec, source, "train", spec.train, rank, shuffled=True)
    validate = None
    if spec.valid is not None:
        kept = spec.valid_rows <= spec.preprocessing.shuffle_window_rows
        validation = keep_batches(open_client(spec, source, "valid", spec.valid, rank, shuffled=False), kept)

        def validate(model: DistributedModelParallel) -> LossSums:
            return evaluate_sums(model, heartbeat.track(validation(), "validating"), device, spec.training)

    return TrainingData(
        lambda position: heartbeat.track(reader.batches(position), "training"), validate, lambda: reader.lost
    )


def make_result(progress: TrainingProgress, device: torch.device) -> dict[str, Any]:
    """Returns the summary of a finished training."""
    return {
        "event": "result",
        "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        "rows": progress.rows,
        "steps": progress.steps,
        "epochs": progress.position.epoch,
        "rows_per_second": progress.speed,
        "stall_fraction": progress.stalled,
        "world_size": dist.get_world_size(),
        "ne_progressive": progress.first_sight.ne,
        "valid_ne": progress.best_ne,
        "best_step": progress.best_step,
        "skipped_batches": progress.skipped_batches,
        "lost": [one.model_dump() for one in progress.position.lost],
        "device": device.type,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def gather_stats(trainer: Trainer, device: torch.device) -> dict[str, list[float]]:
    """Returns for each rank the bytes of its tables and their optimizer, and the median time of its last steps."""
    tables = (tensor for name, tensor in trainer.learner.state().items() if name.split("/")[1].startswith(TABLES))
    own_bytes = sum(_count_local_bytes(tensor) for tensor in tables)
    mine = torch.tensor([own_bytes, 1e3 * trainer.times.median], dtype=torch.float64, device=device)
    shares = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, mine)
    table_bytes, milliseconds = zip(*(share.tolist() for share in shares), strict=True)
    return {"table_bytes": [int(value) for value in table_bytes], "step_milliseconds": list(milliseconds)}


def _count_local_bytes(tensor: Any) -> int:
    return sum(part.numel() * part.element_size() for part in local_parts(tensor))


def predict_probe(spec: RankSpec, model: DistributedModelParallel, rank: int, device: torch.device) -> list[float]:
    """Returns the probabilities of the first evaluation rows, in table order. Computed in fp32, as when serving."""
    whole = spec.preprocessing.model_copy(update={"on_corrupt": "fail"})  # the registered model reads these rows too
    source = InlineSource({"probe": spec.probe}, whole)
    reader = Client(source, ("probe", spec.probe), PROBE_ROWS, rank=rank, world_size=spec.training.world_size)
    batch = next(reader.batches()).to(device)
    model.eval()
    with torch.no_grad():
        values = torch.sigmoid(model(*batch.inputs).double())
    shares = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    kept = [torch.empty_like(batch.weights) for _ in shares]
    dist.all_gather(shares, values)
    dist.all_gather(kept, batch.weights)
    result: list[float] = torch.cat(shares)[torch.cat(kept) > 0].tolist()
    return result


def preload() -> None:
    """Reads the version of the code just imported. Loads what building a model and the first step need."""
    read_code(), read_build()
    load_compiler()
    importlib.import_module("torch.distributed.optim")  # TorchRec imports it where a table gets its optimizer


if __name__ == "__main__":
    plan(sys.argv[2]) if sys.argv[1] == "plan" else main(sys.argv[1])
