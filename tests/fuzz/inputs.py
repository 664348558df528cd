"""All inputs by name."""

from collections.abc import Mapping
from importlib.util import find_spec

from tests.fuzz import access, checkpoints, configs, door, folders, launch, messages, records, scoring, service, tables
from tests.fuzz.harness import Input

INPUTS: Mapping[str, Input] = {
    "config": configs.yaml_file,
    "overrides": configs.overrides,
    "machine": configs.machine,
    "csv": tables.csv,
    "json lines": tables.json_lines,
    **({"avro": tables.avro} if find_spec("fastavro") else {}),
    "door": door.door,
    "nights": door.nights,
    "parquet": tables.parquet,
    "side table": tables.side_table,
    "ingest": tables.ingest,
    "data file": tables.data_file,
    "checkpoint": checkpoints.sealed,
    "forged checkpoint": checkpoints.forged,
    "rows": scoring.rows,
    "request": scoring.request,
    "socket": messages.wire_bytes,
    "error": messages.errors,
    "artifact": records.artifacts,
    "tag": records.tags,
    "sharding plan": records.sharding_plans,
    "foreign file": tables.foreign_file,
    "foreign table": tables.foreign_table,
    "metadata": tables.metadata,
    "worker": service.workers,
    "work": service.work,
    "delivery": service.deliveries,
    "conversation": service.conversation,
    "event": launch.events,
    "error file": launch.error_file,
    "run folder": folders.run_folder,
    "lines": folders.lines,
    "access": access.access,
}
