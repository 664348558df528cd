"""The command of the page `More than one machine` trains on the hosts of a cluster."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster
from tests.hosts.rig import ROOT


@pytest.mark.nightly
def test_the_smoke_run_trains_and_evaluates_on_two_hosts_of_a_ray_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """So few rows would be evaluated on the head. A test of the evaluation compares the two."""
    text = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    (command,) = [block for block in text.split("```")[1::2] if "training.launcher=ray" in block]
    assert cluster.address in command
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = cluster.environment | {"DLRM_HOME": str(tmp_path / "home"), "PATH": binaries}
    command = command.removeprefix("sh\n").rstrip().replace("flows.end_to_end", "tests.hosts.evaluated")
    output = cluster.head.run(["sh", "-ec", command], own, timeout=800)
    result = json.loads(output.strip().splitlines()[-1])
    assert (result["status"], result["train"]["world_size"], result["train"]["rows"]) == ("ok", 2, 10_000)
    assert "nodes of the Ray cluster that evaluated: " in output
    assert 0.0 < result["eval"]["ne"] < 1.0
