"""Follows ranks without a common folder: `python -m tests.hosts.followed SPEC` prints events and result as JSON."""

import json
import sys
from functools import partial
from pathlib import Path

from pipeline.jobs.training.rank_spec import RankSpec
from pipeline.training.launch.external import follow_ranks
from pipeline.training.launch.external_store import StoreGroup
from pipeline.training.launch.processes import Event, Limits
from storage.objects import ObjectFolder
from tests.hosts.rig import ROOT


def main(path: str) -> None:
    spec = RankSpec.model_validate_json(Path(path).read_text(encoding="utf-8"))
    limits, ranks = Limits(deadline_seconds=550, hang_seconds=120), spec.training.world_size
    assert spec.store is not None
    group = partial(StoreGroup, store=ObjectFolder(spec.store, {}))
    module, folder = "pipeline.jobs.training.rank.main", Path(spec.folder)
    show(follow_ranks(module, spec, folder, ranks, 1, limits, show, ROOT, make_group=group))


def show(event: Event) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
