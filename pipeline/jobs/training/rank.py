"""Composition root of a rank process: builds client, model and trainer, and connects them.

A spawned process cannot be given an iterator, so it builds its batches itself.
"""

import datetime
import importlib
import json
import logging
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType

from models.config import DLRMConfig
from models.dlrm import DLRM
from pipeline.data.batch import Batch
from pipeline.errors import ConfigError, ContractError, to_wire
from pipeline.jobs.code_version import read_code
from pipeline.jobs.training.rank_spec import PROBE, SERVICE_FOLDER, WEIGHTS, RankSpec
from pipeline.preprocessing.client import BatchSource, Client, InlineSource, open_remote_source
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec, count_rows
from pipeline.preprocessing.worker import Worker
from pipeline.training.asynchronous import AsyncTrainer
from pipeline.training.config import TrainConfig
from pipeline.training.dense import lacks_bf16
from pipeline.training.launch.external import append_events
from pipeline.training.launch.heartbeat import Heartbeat
from pipeline.training.launch.network import find_meeting, require_hosts, require_place
from pipeline.training.launch.processes import ANSWER, DETERMINISTIC, ERROR
from pipeline.training.optim import TABLES
from pipeline.training.state.checkpoint import (
    CheckpointError,
    full_state,
    local_parts,
    read_progress,
    read_whole,
    require_identity,
    served_prefix,
    whole_shapes,
    write_whole,
)
from pipeline.training.state.checkpoints import StoredCheckpoints
from pipeline.training.state.progress import LossSums, TrainingProgress
from pipeline.training.state.transfer import FeatureState, transfer_state
from pipeline.training.tables.model import shard_model
from pipeline.training.tables.plan import ShardingPlan, describe_plan
from pipeline.training.tables.planner import plan_sharding
from pipeline.training.tables.statistics import SAMPLE_ROWS, TableUse, measure_table_use
from pipeline.training.trainer import Trainer, evaluate_sums
from pipeline.transforms.plan.carry_over import Start, unchanged_features
from pipeline.transforms.plan.plan import Plan
from storage.artifacts import atomic_file, write_json, write_text
from storage.compiled import load_compiler
from storage.objects import ObjectFolder
from storage.warehouse import Warehouse

GROWN = "grown"
"""Name of the checkpoint of a model that continues one with other features."""
PROBE_ROWS = 256
"""Rows whose probabilities the trainer writes. The registered model must reproduce them."""


class ModelSpec(Protocol):
    """What building a model and reading its batches needs."""

    @property
    def model(self) -> DLRMConfig: ...

    @property
    def training(self) -> TrainConfig: ...

    @property
    def preprocessing(self) -> PreprocessingConfig: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def placement(self) -> ShardingPlan | None: ...

    @property
    def seed(self) -> int: ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self: ...


Described = TypeVar("Described", bound=ModelSpec)


class GroupSpec(Protocol):
    """What a rank needs to join its group."""

    @property
    def training(self) -> TrainConfig: ...

    @classmethod
    def model_validate_json(cls, json_data: str) -> Self: ...


Spec = TypeVar("Spec", bound=GroupSpec)


def main(path: str) -> None:
    """Trains as one rank of a group.

    Args:
        path: File with the spec as JSON.
    """
    read_code()  # unless the server of the ranks has
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
        placed = plan_placement(spec, measure_uses(spec))
    except ContractError as error:
        write_json(folder / ERROR, to_wire(error))
        raise
    write_text(folder / ANSWER, placed.model_dump_json(include={"placement"}))


def run_rank(path: str, kind: type[Spec], run: Callable[[Spec, int, torch.device], None]) -> None:
    """Does the work of one rank of a group. If that fails, writes the error for the launcher.

    Args:
        path: File with the spec as JSON.
        run: Called with spec, rank and device.
    Raises:
        ConfigError: If this host does not have the file.
    """
    if not Path(path).exists():
        raise ConfigError(
            f"ranks of '{path}'", "a folder that their hosts share with the training", "no such file on this host",
            "Share `home` among the hosts, or set training.launcher=ray, which needs no common folder.",
        )  # fmt: skip
    spec, rank = kind.model_validate_json(Path(path).read_text(encoding="utf-8")), int(os.environ.get("RANK", "0"))
    logging.disable(logging.WARNING)  # TorchRec's planner warns of intended settings at every start
    try:
        require_place(spec.training.world_size)
        run(spec, rank, start_group(spec.training, rank))
        dist.destroy_process_group()
    except ContractError as error:
        write_json(Path(path).parent / f"error-{rank}.json", to_wire(error))
        raise


def join(text: str, emit: Callable[[dict[str, Any]], None]) -> None:
    """Trains as one rank of a group that exists already.

    Args:
        text: The spec as JSON.
        emit: Takes the events.
    """
    read_code()
    spec = RankSpec.model_validate_json(text)
    logging.disable(logging.WARNING)
    rank = dist.get_rank()
    device = start_group(spec.training, rank)
    train(fit_group(spec, emit), rank, device, emit)


def fit_group(spec: RankSpec, emit: Callable[[dict[str, Any]], None]) -> RankSpec:
    """Returns the spec for the ranks that there are. If they are fewer than planned for, rank 0 plans their tables."""
    there, wanted = dist.get_world_size(), spec.training.world_size
    if there == wanted:
        return spec
    emit({"event": "warning", "text": f"the cluster has no room for {wanted} ranks: training continues with {there}"})
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"world_size": there})})
    plans = [plan_placement(spec, measure_uses(spec)).placement if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(plans)
    return spec.model_copy(update={"placement": plans[0]})


def train(
    spec: RankSpec, rank: int, device: torch.device, emit: Callable[[dict[str, Any]], None] | None = None
) -> None:
    """Trains one rank: builds the trainer, trains, and exports the weights."""
    followed = spec.training.launcher == "external"
    emit = emit or (append_events(Path(spec.folder), rank) if followed else open_event_writer())
    heartbeat = Heartbeat(emit)
    trainer = assemble(spec, rank, device, emit, heartbeat)
    started = time.perf_counter()
    progress = trainer.train()
    seconds = time.perf_counter() - started
    heartbeat.report("exporting")
    by_rank = gather_stats(trainer, device)
    probe = predict_probe(spec, trainer.model, rank, device)
    if rank > 0:
        trainer.export(None, heartbeat.progress)
        return
    folder, store = Path(spec.folder), open_store(spec, heartbeat)
    with atomic_file(folder / WEIGHTS) as temporary:
        weights_sha256 = trainer.export(temporary, heartbeat.progress)
    write_json(folder / PROBE, probe)
    if store is not None:
        for name in (WEIGHTS, PROBE):
            store.put(folder / name, name)
    emit(
        make_result(progress, device)
        | by_rank
        | {
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


def assemble(
    spec: RankSpec, rank: int, device: torch.device, emit: Callable[[dict[str, Any]], None], heartbeat: Heartbeat
) -> Trainer:
    """Builds the trainer with its model, its batches and its validation."""
    world_size = dist.get_world_size()
    model, plan_rows = build_model(spec, world_size, device)
    emit({"event": "start", "plan": plan_rows, "device": device.type, "code": read_code().model_dump()})
    if device.type == "cpu" and spec.training.dense_precision == "bf16" and lacks_bf16(torch.cpu.get_capabilities()):
        slow = "training.dense_precision=bf16 is slow here: PyTorch has no fast bf16 for this processor. Set fp32."
        emit({"event": "warning", "text": slow})
    data = {"train": spec.train} | ({"valid": spec.valid} if spec.valid is not None else {})
    source: BatchSource
    if spec.service is not None:
        source = open_remote_source(spec.service, spec.preprocessing.connections)
    else:
        folder = Path(spec.folder) / SERVICE_FOLDER if world_size == 1 else None
        source = InlineSource(data, spec.preprocessing, folder, lambda text: emit({"event": "warning", "text": text}))
    reader = open_client(spec, source, "train", spec.train, rank, shuffled=True)
    validate = None
    if spec.valid is not None:
        kept = spec.valid_rows <= spec.preprocessing.shuffle_window_rows
        validation = keep_batches(open_client(spec, source, "valid", spec.valid, rank, shuffled=False), kept)

        def validate(model: DistributedModelParallel) -> LossSums:
            return evaluate_sums(model, heartbeat.track(validation(), "validating"), device, spec.training)

    training, store = count_steps(spec), open_store(spec, heartbeat)
    Path(spec.folder).mkdir(parents=True, exist_ok=True)  # on a host of its own
    kind = Trainer if training.sync == "synchronous" else AsyncTrainer
    return kind(
        model,
        training,
        lambda position: heartbeat.track(reader.batches(position), "training"),
        validate,
        Path(spec.folder) / "checkpoints",
        emit,
        spec.seed,
        device,
        describe_identity(spec),
        begin=None if spec.start is None else partial(load_start, spec, heartbeat),
        lost=lambda: reader.lost,
        keeps_lost=spec.preprocessing.on_corrupt == "quarantine",
        store=None if store is None else store.child("checkpoints"),
        claim=spec.claim,
    )


def open_store(spec: RankSpec, heartbeat: Heartbeat) -> ObjectFolder | None:
    """Returns the folder of the training in an object store. None: its hosts share a folder."""
    if spec.store is None:
        return None
    return ObjectFolder(spec.store, spec.train.warehouse.catalog, heartbeat.progress).patient()


def load_start(spec: RankSpec, heartbeat: Heartbeat, trainer: Trainer) -> None:
    """Loads the state of the training to continue into the trainer.

    Raises:
        CheckpointError: If the models differ in more than their features, or this host cannot get the checkpoint.
    """
    assert spec.start is not None
    folder = Path(spec.start.checkpoint)
    if spec.start.store is not None:  # also if there is a copy: it may be of an earlier training of that name
        store = ObjectFolder(spec.start.store, spec.train.warehouse.catalog, heartbeat.progress).patient()
        StoredCheckpoints(folder.parent, store).fetch(folder.name)
    if not folder.exists():
        raise CheckpointError(
            f"checkpoint '{folder}'", "a folder that every host of the ranks sees", "none on this one",
            "Share the home among the hosts, or train from scratch.",
        )  # fmt: skip
    if spec.start.plan.hash == spec.train.plan.hash:
        trainer.start_from(folder)
        return
    transfer_checkpoint(spec, spec.start, trainer)
    trainer.start_from(trainer.checkpoints.fetch(GROWN, known=True))
    dist.barrier()  # until all ranks have read it
    trainer.checkpoints.remove(GROWN)


def transfer_checkpoint(spec: RankSpec, start: Start, trainer: Trainer) -> None:
    """Writes the checkpoint GROWN for the model with other features. Rank 0 makes it in its own memory."""
    folder, source = trainer.checkpoints.folder / GROWN, Path(start.checkpoint)
    trainer.make_dense_state()
    state = {name: tensor for name, tensor in trainer.state().items() if not name.startswith("average/")}
    moments = {name: torch.zeros(shape) for name, shape in whole_shapes(state).items() if name.startswith("tables/")}
    fresh = full_state({name: tensor for name, tensor in state.items() if name not in moments})
    if fresh is not None:
        fresh |= moments  # the optimizers' state before the first step
        served = served_prefix(source)
        stored = read_whole(source, served, "dense/", "tables/")
        old = {name.replace(served, "model/", 1): tensor for name, tensor in stored.items()}
        old_spec = spec.model_copy(update={"train": spec.train.model_copy(update={"plan": start.plan})})
        require_identity(source, describe_identity(old_spec))
        before, now = (FeatureState(dense=plan.dense, bags=plan.sparse) for plan in (start.plan, spec.train.plan))
        made = transfer_state(spec.model, old, fresh, (before, now), unchanged_features(spec.train.plan, start.plan))
        progress = read_progress(source) | {"averaged": 0}
        write_whole(folder, made.tensors, progress, describe_identity(spec))
        trainer.checkpoints.share(GROWN)
        trainer.emit({"event": "grown", "new": list(made.new_tables), "larger": list(made.larger_tables)})
    dist.barrier()


def make_result(progress: TrainingProgress, device: torch.device) -> dict[str, Any]:
    """Returns the summary of a finished training."""
    return {
        "event": "result",
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
    tables = (tensor for name, tensor in trainer.state().items() if name.split("/")[1].startswith(TABLES))
    own_bytes = sum(_count_local_bytes(tensor) for tensor in tables)
    mine = torch.tensor([own_bytes, 1e3 * trainer.step_median], dtype=torch.float64, device=device)
    shares = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, mine)
    table_bytes, milliseconds = zip(*(share.tolist() for share in shares), strict=True)
    return {"table_bytes": [int(value) for value in table_bytes], "step_milliseconds": list(milliseconds)}


def _count_local_bytes(tensor: Any) -> int:
    return sum(part.numel() * part.element_size() for part in local_parts(tensor))


def describe_identity(spec: RankSpec) -> dict[str, str]:
    """Returns what a checkpoint must match: transforms, model and optimizers."""
    settings = {f"model.{key}": value for key, value in spec.model.model_dump(mode="json").items()}
    optimizers = spec.training.model_dump(
        mode="json", include={"dense_optimizer", "table_optimizer", "table_precision"}
    )
    settings |= {f"training.{key}": value for key, value in optimizers.items()}
    return {key: str(value) for key, value in settings.items()} | {"preprocessing plan": spec.train.plan.hash}


def build_model(
    spec: ModelSpec, world_size: int, device: torch.device, drawn: bool = True
) -> tuple[DistributedModelParallel, list[dict[str, Any]]]:
    """Builds the sharded model. Returns it with its sharding plan as rows.

    The initial state is the same for every sharding plan and world size.

    Args:
        drawn: See `shard_model`.
    """
    torch.manual_seed(spec.seed)
    training = spec.training.model_copy(update={"world_size": world_size})
    model, placement = shard_model(
        build_unsharded(spec), training, device, spec.seed, spec.model.embedding_init, spec.placement, drawn
    )
    kind = {} if training.sync == "synchronous" else {"sharding": "shared"}
    return model, [row | kind for row in describe_plan(placement)]


def build_unsharded(spec: ModelSpec) -> DLRM:
    """Builds the model on the meta device: its tables take no memory."""
    kind = DataType.FP16 if spec.training.table_precision == "fp16" else DataType.FP32
    return DLRM(spec.model, len(spec.plan.dense), spec.plan.sparse, "meta", kind)


def plan_placement(spec: Described, uses: Mapping[str, TableUse]) -> Described:
    """Returns the spec with the sharding plan of its tables. It is made before the ranks start: all use the same.

    Raises:
        ContractError: If the tables cannot be sharded as the config says.
    """
    device = "cuda" if takes_cuda(spec.training) else "cpu"
    return spec.model_copy(
        update={"placement": plan_sharding(build_unsharded(spec), spec.training.for_sharding, device, uses)}
    )


def measure_uses(spec: RankSpec) -> dict[str, TableUse]:
    """Measures the use of the tables on the first training rows of the snapshot. Always the same sample."""
    rows = Worker(spec.train).sample(SAMPLE_ROWS)
    return measure_table_use(spec.train.plan.sparse, rows, spec.training.batch_rows)


def keep_batches(reader: Client, kept: bool) -> Callable[[], Iterator[Batch]]:
    """Returns a function that iterates over the reader's batches.

    Args:
        kept: Reads the batches once and keeps them in memory.
    """
    if not kept:
        return reader.batches
    batches: list[Batch] = []

    def iterate() -> Iterator[Batch]:
        if not batches:
            batches.extend(reader.batches())
        return iter(batches)

    return iterate


def open_client(spec: ModelSpec, source: BatchSource, name: str, data: DataSpec, rank: int, shuffled: bool) -> Client:
    """Returns this rank's client for a selection of rows."""
    window = spec.preprocessing.shuffle_window_rows if shuffled else None
    return Client(
        source, (name, data), spec.training.batch_rows, spec.seed, window, rank, spec.training.world_size,
        attempt=int(os.environ.get("DLRM_ATTEMPT", "0")),
    )  # fmt: skip


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


def takes_cuda(config: TrainConfig) -> bool:
    """Whether each rank runs on a CUDA device."""
    fitting = config.sync == "synchronous" and config.launcher == "processes" and config.lanes is None
    enough = fitting and torch.cuda.device_count() >= config.world_size
    return config.device == "cuda" or (config.device == "auto" and enough)


def start_group(config: TrainConfig, rank: int) -> torch.device:
    """Joins the group unless it exists already. Uses nccl if every rank has a CUDA device, else gloo.

    Raises:
        ConfigError: If the ranks are not on the hosts that the config names.
    """
    cuda = takes_cuda(config)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        os.environ.setdefault(*DETERMINISTIC)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or config.threads_per_rank or 1))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # takes time
    if not dist.is_initialized():
        place, limit = (rank, config.world_size), datetime.timedelta(minutes=30)
        store = next(dist.rendezvous(find_meeting(), *place, timeout=limit))[0]
        # torchrun keeps its store when it restarts ranks, and the addresses of the dead ones are in it
        store = dist.PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=store, rank=rank, world_size=config.world_size, timeout=limit
        )
    if config.hosts > 1:
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, (socket.gethostname(), int(os.environ["LOCAL_WORLD_SIZE"])))
        require_hosts(places, config.hosts)
    return device


def open_event_writer() -> Any:
    """Returns a thread-safe function that sends events to the launcher as JSON lines. Only rank 0 sends."""
    number = os.environ.get("DLRM_EVENTS_FD")
    if number is None:
        return lambda event: None
    pipe = os.fdopen(int(number), "w", buffering=1, encoding="utf-8")
    lock = threading.Lock()

    def emit(event: dict[str, Any]) -> None:
        line = json.dumps(event) + "\n"
        with lock:
            pipe.write(line)

    return emit


def preload() -> None:
    """Reads the version of the code just imported. Loads what building a model and the first step need."""
    read_code()
    load_compiler()
    importlib.import_module("torch.distributed.optim")  # TorchRec imports it where a table gets its optimizer


if __name__ == "__main__":
    plan(sys.argv[2]) if sys.argv[1] == "plan" else main(sys.argv[1])
