"""What all tests share: quiet libraries, few threads, and the folder of real data where it is at hand."""

import os
from pathlib import Path

import pytest

import flows  # noqa: F401  sets the environment that a run has

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the data sets that are not part of the project."""
    folder = Path(os.environ.get("DLRM_DATA", SHARED))
    if not (folder / "ml100k").exists():
        pytest.skip(f"needs the data sets of the README below {folder}; set DLRM_DATA")
    return folder
