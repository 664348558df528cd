"""A rank like `pipeline.jobs.training.rank`, but with all batches in memory before it trains.

`benchmarks.training` runs it as the product runs its ranks. The batches come from the spec's training rows.
"""

import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch.distributed as dist

from pipeline.data.position import NO_TIMES
from pipeline.jobs.training.rank import build_model, make_result, open_client, open_event_writer, start_group
from pipeline.jobs.training.rank_spec import RankSpec
from pipeline.preprocessing.client import InlineSource
from pipeline.training.trainer import Trainer


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
    folder = Path(spec.folder) / "checkpoints"
    trainer = Trainer(model, spec.training, lambda position: iter(batches), None, folder, emit, spec.seed, device)
    emit(make_result(trainer.train(), device) | {"step_milliseconds": [1e3 * trainer.step_median]})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
