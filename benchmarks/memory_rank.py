"""A rank like `pipeline.jobs.training.rank.main`, but with all batches in memory before it trains.

`benchmarks.training` runs it as the product runs its ranks. The batches come from the spec's training rows.
"""

import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch.distributed as dist

from pipeline.data.position import NO_TIMES
from pipeline.jobs.training.rank.group import open_event_writer, start_group
from pipeline.jobs.training.rank.main import make_result
from pipeline.jobs.training.rank.model import build_model, open_client
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.preprocessing.client import InlineSource
from pipeline.training.restore import Restore
from pipeline.training.state.checkpoints import Checkpoints
from pipeline.training.trainer import Trainer, TrainingData


def main(path: str) -> None:
    """Trains `max_steps` steps of the first epoch as the only rank."""
    spec = RankSpec.model_validate_json(Path(path).read_text(encoding="utf-8"))
    device = start_group(spec.training, 0)
    emit = open_event_writer()
    model, _ = build_model(spec, 1, device)
    reader = open_client(
        spec, InlineSource({"train": spec.train}, spec.preprocessing), "train", spec.train, 0, shuffled=True
    )
    batches = [replace(batch, times=NO_TIMES) for batch in islice(reader.batches(), spec.training.max_steps)]
    data = TrainingData(lambda position: iter(batches))
    restore = Restore(Checkpoints(Path(spec.folder) / "checkpoints"))
    trainer = Trainer(model, spec.training, data, restore, emit, spec.seed, device)
    emit(make_result(trainer.train(), device) | {"step_milliseconds": [1e3 * trainer.times.median]})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
