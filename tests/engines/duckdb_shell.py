"""Answers queries with DuckDB and its Iceberg extension, a JSON text a line. Runs in a process of its own.

The version is one for which the package registry has the extension. It is not the one that this project uses.
"""

import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Answers until the input ends."""
    sys.path.insert(0, str(folder))
    import duckdb  # from that folder

    connection = duckdb.connect(config={"extension_directory": str(folder / "installed")})
    for name in ("avro", "iceberg"):
        [file] = folder.glob(f"duckdb_extension_{name}/extensions/*/{name}.duckdb_extension")
        connection.execute(f"INSTALL '{file}'; LOAD {name}")
    for line in sys.stdin:
        try:
            answer: dict[str, object] = {"rows": connection.execute(json.loads(line)).fetchall()}
        except duckdb.Error as error:
            answer = {"error": str(error)}
        print(json.dumps(answer, default=str), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
