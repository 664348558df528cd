"""Trains a spec on a Ray cluster: `python -m tests.hosts.ray_ranks SPEC ADDRESS` prints events and result as JSON."""

import json
import sys
from pathlib import Path

from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.training.launch.processes import Event, Limits
from pipeline.training.launch.ray_train import run_ranks_on_ray
from tests.hosts.rig import ROOT


def main(path: str, address: str) -> None:
    spec = RankSpec.model_validate_json(Path(path).read_text(encoding="utf-8"))
    limits, (ranks, *fewer) = (
        Limits(deadline_seconds=550, hang_seconds=120, restart_limit=2),
        spec.training.rank_numbers,
    )
    module, folder = "pipeline.jobs.training.rank.main", Path(spec.folder)
    result = run_ranks_on_ray(
        module, spec, folder, ranks, 1, limits, show, ROOT, address, spec.training.resources, fewer=fewer
    )
    show(result)


def show(event: Event) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
