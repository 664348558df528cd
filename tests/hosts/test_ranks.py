"""Ranks on two hosts train as ranks on one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.jobs.training.rank_spec import RankSpec
from tests.hosts.cluster import Cluster
from tests.pipeline.conftest import SETTINGS, Run

pytestmark = pytest.mark.slow


def test_ranks_of_ray_on_two_hosts_train_as_processes_of_one(
    cluster: Cluster, rank_spec: Callable[..., RankSpec], undisturbed: Run, tmp_path: Path
) -> None:
    """Bit for bit, although the name of each host is that of its loopback."""
    spec, path = rank_spec(tmp_path / "run", **SETTINGS, resources={"place": 1}), tmp_path / "given.json"
    path.write_text(spec.model_dump_json())
    found = json.loads(cluster.run("tests.hosts.ray_ranks", str(path), cluster.address).splitlines()[-1])
    for name in ("weights_sha256", "valid_ne", "steps", "rows"):
        assert found[name] == undisturbed.result[name]


def test_workers_and_ranks_run_where_their_resources_are(cluster: Cluster, tmp_path: Path) -> None:
    found = json.loads(cluster.run("tests.hosts.placed", str(tmp_path), cluster.address).splitlines()[-1])
    assert found == {"workers": ["one", "one"], "ranks": ["two", "two"]}
