"""Fetches a public data set and writes it as the files that its example config reads. Without a name, lists the sets.

    dlrm dataset movielens100k
    dlrm dataset criteo path=Criteo_x4.zip data=/data

Not a Prefect flow: it is done once. Files go to data/NAME, or below DLRM_DATA. `path` is an archive, or a folder with
its files, that was fetched before. All content is held against the publisher's checksums.
"""

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config.files import ROOT
from pipeline.errors import ConfigError, ContractError
from pipeline.extraction.public.prepare import find_set, prepare
from pipeline.extraction.public.sets import SETS
from pipeline.jobs.console import Progress

FOLDERS = {"movielens100k": "ml100k"}
"""Set -> its folder below the data, where that is not its name."""


def listing(data: Path) -> str:
    """The sets, a line each, with what is there."""
    lines = []
    for name, one in SETS.items():
        there = all((folder_of(name, data) / f"{table}.parquet").exists() for table in one.tables)
        lines.append(f"{name:<14} {'here ' if there else '-    '} {one.title} {one.config}")
    return "\n".join(lines)


def folder_of(name: str, data: Path) -> Path:
    """Returns where a set's files are."""
    return data / FOLDERS.get(name, name)


def parse(words: Sequence[str]) -> tuple[str | None, Path | None, Path]:
    """Returns the set's name, the archive or folder, and the folder of all data."""
    names = [word for word in words if "=" not in word]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    unknown = sorted(given.keys() - {"path", "data"})
    if len(names) > 1 or unknown:
        found = f"{' '.join(names)} {' '.join(unknown)}".strip()
        raise ConfigError("command line", "NAME [path=ARCHIVE] [data=FOLDER]", found, "`dlrm dataset` lists the names.")
    # Without data= it is where the configs look: beside them, or as the variable says from the current folder.
    data = Path(given.get("data") or os.environ.get("DLRM_DATA") or ROOT / "data")
    path = Path(given["path"]).expanduser() if "path" in given else None
    return (names[0] if names else None), path, data.expanduser()


def main(words: Sequence[str]) -> int:
    """Prints the list or the result line. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        name, path, data = parse(words)
        if name is None:
            print(listing(data))
            return 0
        one = find_set(name)
        log = logging.getLogger("dlrm")
        log.info("%s. Licence: %s. From %s", one.title, one.licence, path or one.address)
        with Progress(log, "bytes") as progress:
            rows = prepare(one, folder_of(name, data), path, progress)
    except KeyboardInterrupt:
        print("Interrupted. Run the same command to resume.", file=sys.stderr)
        return 1
    except (ContractError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        print(json.dumps({"status": "failed", "error": f"{error}"}))
        return 1
    result: dict[str, Any] = {"status": "ok", "dataset": name, "folder": f"{folder_of(name, data)}", "rows": rows}
    print(json.dumps(result | {"next": f"dlrm end-to-end {one.config}"}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
