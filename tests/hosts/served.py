"""A preprocessing service, and ranks of other hosts that read from it.

`python -m tests.hosts.served cluster FOLDER ADDRESS` serves the data of FOLDER/spec.json until FOLDER/done exists, with
workers on a Ray cluster. `python -m tests.hosts.served host FOLDER ADDRESS` does so with workers on its own host.
`python -m tests.hosts.served rank FOLDER RANK RANKS` prints each of the rank's batches as a hash.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.data.position import Position
from pipeline.preprocessing.client import BatchSource, open_remote_source
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.epoch import stream
from pipeline.preprocessing.service import Service
from pipeline.preprocessing.transport.addresses import ServiceAddress
from tests.pipeline.preprocessing.reference import CONFIG, TIGHT_BYTES, client, tensors

EPOCHS = 4


def serve(folder: Path, given: dict[str, Any]) -> None:
    """Serves with two workers, and with little memory, so that most work is done while batches are taken."""
    stream.GROUP_ROWS = 160
    config = CONFIG.model_copy(update=given | {"workers": 2, "lease_seconds": 60.0, "memory_bytes": TIGHT_BYTES})
    spec = DataSpec.model_validate_json((folder / "spec.json").read_text(encoding="utf-8"))
    with Service({"days": spec}, config, folder / "service", lambda text: print(text, flush=True)) as service:
        (folder / "address.new").write_text(service.address.model_dump_json(), encoding="utf-8")
        (folder / "address.new").rename(folder / "address.json")
        while not (folder / "done").exists():
            time.sleep(0.1)
        print(json.dumps({"restarts": service.totals.restarts}), flush=True)


def take(folder: Path, rank: int, ranks: int) -> None:
    """Takes the batches of some epochs."""
    spec = DataSpec.model_validate_json((folder / "spec.json").read_text(encoding="utf-8"))
    address = ServiceAddress.model_validate_json((folder / "address.json").read_text(encoding="utf-8"))
    for line in hashes(open_remote_source(address, 2), spec, rank, ranks):
        print(line, flush=True)


def hashes(source: BatchSource, spec: DataSpec, rank: int, ranks: int) -> Iterator[str]:
    """Yields a hash of each of a rank's batches."""
    reader = client(source, spec, rank=rank, world_size=ranks)
    for epoch in range(EPOCHS):
        for batch in reader.batches(Position(epoch=epoch)):
            digest = hashlib.sha256(batch.position.model_dump_json().encode())
            for tensor in tensors(batch):
                digest.update(tensor.contiguous().numpy().tobytes())
            yield digest.hexdigest()


if __name__ == "__main__":
    kind, place, *words = sys.argv[1:]
    if kind == "cluster":
        serve(Path(place), {"executor": "ray", "ray_address": words[0], "resources": {"place": 1.0}})
    elif kind == "host":
        serve(Path(place), {"executor": "process", "transport": "network", "host": words[0]})
    else:
        take(Path(place), int(words[0]), int(words[1]))
