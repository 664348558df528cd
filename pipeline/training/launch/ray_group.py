"""The process group of ranks that Ray Train starts. It needs Ray, so nothing imports this module without it."""

from typing import Any

import ray
from ray.train.torch import TorchConfig

from pipeline.training.launch.network import set_interface


class NodeTorchConfig(TorchConfig):
    """Ray's process group, in which each rank uses the interface of the address by which Ray knows its node.

    Ray leaves that choice to gloo, which takes the interface of the node's name.
    """

    @property
    def backend_cls(self) -> Any:
        return _NodeBackend


class _NodeBackend(TorchConfig().backend_cls):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        worker_group.execute(_set_own_interface)
        super().on_start(worker_group, backend_config)


def _set_own_interface() -> None:
    set_interface(ray.util.get_node_ip_address())
