"""Ranks on two hosts train as ranks on one."""

import json
import secrets
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.transforms.plan.carry_over import Start
from pipeline.transforms.plan.plan import Plan
from tests.hosts.cluster import Cluster
from tests.hosts.rig import Network
from tests.objects import SERVE, Store
from tests.pipeline.conftest import SETTINGS, Run, completed

MAKE_BUCKET = """
import boto3, os, time
from botocore.exceptions import EndpointConnectionError
client = boto3.client("s3")
for _ in range(300):
    try:
        client.create_bucket(Bucket="kept")
        break
    except EndpointConnectionError:
        time.sleep(0.1)
"""
LIST = """
import boto3, json
print(json.dumps([one["Key"] for one in boto3.client("s3").list_objects_v2(Bucket="kept")["Contents"]]))
"""


@pytest.mark.nightly
def test_ranks_on_two_hosts_without_a_common_folder_train_as_processes_of_one(
    cluster: Cluster, rank_spec: Callable[..., RankSpec], undisturbed: Run, tmp_path: Path
) -> None:
    """Bit for bit, although the name of each host is that of its loopback.

    Checkpoints are in a store: each host has a /tmp of its own. Both write their shards, and load the best checkpoint.
    Then a model with other features continues on hosts that have lost their copies.
    """
    pytest.importorskip("moto", reason="the S3 server comes with `make setup EXTRAS=objects`")
    head, store = cluster.head, Store(f"http://{cluster.head.address}:5999", "kept")
    spec = rank_spec(tmp_path / "run", **SETTINGS, resources={"place": 1})
    warehouse = spec.train.warehouse.model_copy(update={"catalog": store.properties})
    train = spec.train.model_copy(update={"warehouse": warehouse})
    address = f"s3://{store.bucket}/run"
    spec = spec.model_copy(update={"train": train, "folder": f"/tmp/own-{tmp_path.name}/run", "store": address})
    path, later_path = tmp_path / "given.json", tmp_path / "later.json"
    path.write_text(spec.model_dump_json())
    later = {
        place: without_lists(one, f"{folder}/later", source, kept) for place, one, folder, source, kept in (
            ("one host", undisturbed.spec, tmp_path, undisturbed.folder, None),
            ("two hosts", spec, f"/tmp/own-{tmp_path.name}", spec.folder, f"{address}/checkpoints"),
        )
    }  # fmt: skip
    later["two hosts"] = later["two hosts"].model_copy(update={"store": f"s3://{store.bucket}/later"})
    later_path.write_text(later["two hosts"].model_dump_json())
    with head.start([sys.executable, "-c", SERVE, head.address, "5999"], stderr=subprocess.DEVNULL) as server:
        try:
            head.run([sys.executable, "-c", MAKE_BUCKET], store.variables)
            found = json.loads(cluster.run("tests.hosts.ray_ranks", str(path), cluster.address).splitlines()[-1])
            names = json.loads(head.run([sys.executable, "-c", LIST], store.variables))
            for node in cluster.nodes.values():
                assert "best" in node.run(["ls", f"{spec.folder}/checkpoints"]).split()
                node.run(["rm", "-r", spec.folder])
            continued = cluster.run("tests.hosts.ray_ranks", str(later_path), cluster.address)
            left = json.loads(head.run([sys.executable, "-c", LIST], store.variables))
        finally:
            server.kill()
    for name in ("weights_sha256", "valid_ne", "steps", "rows"):
        assert found[name] == undisturbed.result[name]
    best = {one.rpartition("/")[2] for one in names if "/best-" in one}
    assert best >= {"__0_0.distcp", "__1_0.distcp", ".metadata"}
    assert {"run/weights.safetensors", "run/probe.json", "run/checkpoints/index.json"} <= set(names)
    expected = completed(later["one host"]).result["weights_sha256"]
    assert json.loads(continued.splitlines()[-1])["weights_sha256"] == expected != found["weights_sha256"]
    for node in cluster.nodes.values():
        assert "grown" not in node.run(["ls", f"{later['two hosts'].folder}/checkpoints"]).split()
    assert [one for one in left if "/grown-" in one] == []


@pytest.mark.nightly
@pytest.mark.parametrize("fate", ["lost", "replaced"])
def test_a_training_in_lanes_outlives_a_host(
    fate: str, make_network: Callable[[], Network], rank_spec: Callable[..., RankSpec], tmp_path: Path
) -> None:
    """It continues with fewer ranks, or on the host that replaces it. The weights are those of an undisturbed one."""
    pytest.importorskip("ray", reason="needs Ray: make setup EXTRAS=ray")
    settings: dict[str, Any] = SETTINGS | {"lanes": 4, "checkpoint_async": False}
    expected = completed(rank_spec(tmp_path / "undisturbed", **settings | {"world_size": 1})).result
    places = {"launcher": "ray", "resources": {"place": 1}, "world_size": 2, "least_ranks": 1}
    spec = rank_spec(tmp_path / "run", **settings | places)
    path = tmp_path / "given.json"
    path.write_text(spec.model_dump_json())
    said: list[dict[str, Any]] = []
    with closing(Cluster(make_network(), secrets.token_hex(16), {"one": {"place": 1}, "two": {"place": 1}})) as cluster:
        words = [sys.executable, "-m", "tests.hosts.ray_ranks", str(path), cluster.address]
        training = cluster.head.start(words, cluster.environment, stdout=subprocess.PIPE, text=True)
        for line in training.stdout:
            if not line.startswith("{"):  # Ray says that a node is gone
                continue
            said.append(json.loads(line))
            if said[-1].get("event") == "saved" and "two" in cluster.nodes:
                cluster.nodes.pop("two").kill()
                if fate == "replaced":
                    cluster.add("three", {"place": 1})
    training.wait()
    found = said[-1]
    assert found["world_size"] == (1 if fate == "lost" else 2)
    assert [one["event"] for one in said if one.get("event") == "resumed"] == ["resumed"]
    warned = [one["text"] for one in said if one.get("event") == "warning"]
    less = "the cluster has no room for 2 ranks: training continues with 1"
    assert warned == ([less] if fate == "lost" else [])
    for name in ("weights_sha256", "valid_ne", "steps", "rows"):
        assert found[name] == expected[name]


def without_lists(spec: RankSpec, folder: str, source: Path | str, store: str | None) -> RankSpec:
    """A training that continues another one with fewer features."""
    plan = spec.train.plan
    ops = tuple(op for op in plan.ops if "list_items" not in op.inputs)
    raw = {name: kinds for name, kinds in plan.raw.items() if name != "list_items"}
    fewer = Plan.model_validate(plan.model_dump() | {"sparse": plan.sparse[:1], "ops": ops, "raw": raw})
    parts = {part: getattr(spec, part).model_copy(update={"plan": fewer}) for part in ("train", "valid", "probe")}
    start = Start(checkpoint=f"{source}/checkpoints/best", plan=plan, store=store)
    return spec.model_copy(update={**parts, "folder": folder, "start": start})


@pytest.mark.nightly
def test_workers_and_ranks_run_where_their_resources_and_labels_are(cluster: Cluster, tmp_path: Path) -> None:
    found = json.loads(cluster.run("tests.hosts.placed", str(tmp_path), cluster.address).splitlines()[-1])
    assert found.pop("two ranks on each") in (["one"] * 2 + ["two"] * 2, ["two"] * 2 + ["one"] * 2)
    assert found == {
        "workers": ["one", "one"], "ranks": ["two", "two"],
        "workers by label": ["two", "two"], "ranks by label": ["one", "one"],
    }  # fmt: skip
