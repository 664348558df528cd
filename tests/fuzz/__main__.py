"""python -m tests.fuzz [minutes=1] [input=NAME] [first=0], or input=NAME case=N to repeat a case and see what it raises.

Each input has its own process, because damaged files can crash libraries. It goes on after a case that fails.
"""

import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.harness import play
from tests.fuzz.inputs import INPUTS

COUNTS = struct.Struct("=qqqd")
"""Case that was begun last, cases read, cases refused, seconds of CPU. The parent reads it after a crash."""
ADDRESS_BYTES = 8 << 30
"""Address space of a child on top of what it has with all libraries. A mutant must not take the machine's memory."""
GRACE_SECONDS = 180.0
"""After this time over its end, a child hangs."""


def bound_memory() -> None:
    """Makes this process fail to allocate more than ADDRESS_BYTES."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_BYTES, resource.RLIM_INFINITY))


def serve(name: str, first: int, seconds: float, notes: Path) -> None:
    """Plays cases for some time. Prints those that fail."""
    found: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        notes.open("r+b", buffering=0) as file,
        INPUTS[name](Path(folder)) as case,
    ):
        begun, number, cpu = time.monotonic(), first, time.process_time()
        while time.monotonic() - begun < seconds:
            file.seek(0)
            file.write(COUNTS.pack(number, found["read"], found["refused"], time.process_time() - cpu))
            try:
                found[play(name, case, number)] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                place = error.__traceback__
                while place and place.tb_next:
                    place = place.tb_next
                where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place else ""
                text = " ".join(f"{error}".split()).encode(errors="replace").decode()[:200]
                print(f"FAILED {name} {number} {type(error).__name__} at {where}: {text}", flush=True)
                found["failed"] += 1
            number += 1
        file.seek(0)
        file.write(COUNTS.pack(number, found["read"], found["refused"], time.process_time() - cpu))


def fuzz(name: str, first: int, seconds: float) -> tuple[int, int]:
    """Fuzzes one input for some time. Returns the numbers of cases and of failed ones."""
    end, failed, totals, number = time.monotonic() + seconds, 0, [0, 0, 0.0], first
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        while (left := end - time.monotonic()) > 0:
            notes.write_bytes(COUNTS.pack(number, 0, 0, 0.0))
            words = [sys.executable, "-m", "tests.fuzz", "serve", name, str(number), str(left), str(notes)]
            child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            try:
                output = child.communicate(timeout=left + GRACE_SECONDS)[0]
            except subprocess.TimeoutExpired:
                child.kill()
                output = child.communicate()[0]
            lines = [line for line in output.splitlines() if line.startswith("FAILED")]
            number, *counts = COUNTS.unpack(notes.read_bytes())
            totals = [one + other for one, other in zip(totals, counts, strict=True)]
            if child.returncode:
                lines.append(f"FAILED {name} {number}: the process ended with {child.returncode}")
                number += 1
            print("\n".join(lines), end="\n" if lines else "", flush=True)
            failed += len(lines)
    read, refused, cpu = totals
    print(
        f"{name:18} {number - first:9,} cases, {read:,} read, {refused:,} refused, {failed} failed, {cpu:.0f} s",
        flush=True,
    )
    return number - first, failed


def main(words: list[str]) -> int:
    """Fuzzes all inputs, or one, or repeats one case."""
    if words[:1] == ["serve"]:
        bound_memory()
        serve(words[1], int(words[2]), float(words[3]), Path(words[4]))
        return 0
    given = dict(word.split("=", 1) for word in words)
    names = [given["input"]] if "input" in given else list(INPUTS)
    if "case" in given:
        bound_memory()
        with tempfile.TemporaryDirectory() as folder, INPUTS[names[0]](Path(folder)) as case:
            print(play(names[0], case, int(given["case"])))
        return 0
    seconds = 60.0 * float(given.get("minutes", 1)) / len(names)
    results = [fuzz(name, int(given.get("first", 0)), seconds) for name in names]
    print(f"{sum(count for count, _ in results):,} cases, {sum(failed for _, failed in results)} failed")
    return int(any(failed for _, failed in results))


if __name__ == "__main__":
    os.environ.pop("DLRM_HOME", None)
    sys.exit(main(sys.argv[1:]))
