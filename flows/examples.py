"""Writes the example configs and their data into the current folder.

Not a Prefect flow: it copies files. Files that exist stay as they are.
"""

import shutil
import sys
import sysconfig
from pathlib import Path

from pipeline.processes.process import CHECKOUT, PACKAGES

FOLDERS = ("configs", "data")


def examples(target: Path) -> list[str]:
    """Copies the examples into a folder.

    Returns:
        The files that were written, relative to the folder.
    """
    source = PACKAGES if CHECKOUT else Path(sysconfig.get_path("data")) / "share" / "dlrm-pipeline"
    written = []
    for path in sorted(path for folder in FOLDERS for path in (source / folder).rglob("*") if path.is_file()):
        name = path.relative_to(source)
        if not (target / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / name)
            written.append(str(name))
    return written


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit("error: `dlrm examples` takes no arguments. It writes into the current folder.")
    print("\n".join(f"wrote {name}" for name in examples(Path.cwd())) or "the current folder has all examples already")
