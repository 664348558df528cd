"""All inputs by name."""

from collections.abc import Mapping

from tests.fuzz import checkpoints, configs, messages, records, scoring, tables
from tests.fuzz.harness import Input

INPUTS: Mapping[str, Input] = {
    "config": configs.yaml_file,
    "overrides": configs.overrides,
    "machine": configs.machine,
    "csv": tables.csv,
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
}
