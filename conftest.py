"""Says in which order and processes the tests run. Modules that need an extra have their examples run where it is."""

from importlib.util import find_spec
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

NEEDS_RAY = [
    "pipeline/jobs/evaluation/ray_portions.py",
    "pipeline/preprocessing/ray_executor.py",
    "pipeline/training/launch/ray_group.py",
]
collect_ignore = [] if find_spec("ray") else NEEDS_RAY

CLUSTERS = (
    "tests/hosts/test_ranks.py",
    "tests/hosts/test_flows.py",
    "tests/hosts/test_external.py",
    "tests/hosts/test_batches.py",
    "tests/hosts/test_rig.py",
    "tests/pipeline/training/launch/test_ray_train.py",
    "tests/pipeline/jobs/evaluation/test_portions.py",
    "tests/pipeline/preprocessing/test_ray_executor.py",
)
"""Files that start clusters, one after the other: several at once starve each other on two processors."""
LONGEST = (
    "tests/flows/test_servers.py",
    *CLUSTERS,
    "tests/pipeline/jobs/training/test_rank.py",
    "tests/flows/test_train.py",
    "tests/pipeline/preprocessing/test_chaos.py",
    "tests/flows/test_preprocess.py",
    "tests/flows/test_shared_catalog.py",
    "tests/flows/test_checkpoint.py",
    "tests/flows/test_characterize.py",
    "tests/flows/test_estimate.py",
    "tests/flows/test_sweep.py",
    "tests/pipeline/training/test_asynchronous.py",
    "tests/flows/test_recurring.py",
    "tests/pipeline/preprocessing/test_client.py",
    "tests/flows/test_sharding.py",
    "tests/benchmarks/test_training.py",
    "tests/flows/test_outage.py",
    "tests/flows/test_release.py",
    "tests/flows/test_gate.py",
    "tests/flows/test_replay.py",
    "tests/pipeline/training/tables/test_sharding.py",
    "tests/flows/test_doctor.py",
)
"""Files whose tests take longest, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A long file that comes last leaves the other processes idle."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.location[0], len(LONGEST)))


class OneCluster(LoadFileScheduling):
    """Gives each process whole files, and all files that start clusters to one process."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "clusters" if file in CLUSTERS else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneCluster:
    return OneCluster(config, log)
