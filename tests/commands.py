"""Commands that tests start, wait for and kill. What they print is in the message of a failure."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipeline.config.files import ROOT


@contextmanager
def killed(flow: str, *words: str, environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts `python -m flows.FLOW WORDS`, and kills it with SIGKILL at the end of the block.

    Args:
        log: The new file that receives what the command prints.
    """
    line = [sys.executable, "-m", f"flows.{flow}", *words]
    with log.open("wb") as output:
        process = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def wait_for(found: Callable[[], object], process: subprocess.Popen[bytes], log: Path, seconds: float = 400.0) -> None:
    """Waits until `found()` is true.

    Raises:
        AssertionError: The process ended before, or the time is over.
    """
    limit = time.monotonic() + seconds
    while not found():
        assert process.poll() is None, f"it ended by itself, code {process.returncode}:\n{log.read_text()[-4000:]}"
        assert time.monotonic() < limit, f"still waiting after {seconds:.0f} s:\n{log.read_text()[-4000:]}"
        time.sleep(0.02)
