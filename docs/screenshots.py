"""Makes the screenshots of the pages: `python docs/screenshots.py` (a few minutes).

Needs a Chromium, such as that of Debian (`apt install chromium`), named by CHROMIUM if it is not in PATH. Trains the
smoke config twice in a temporary home, starts `flows.ui` on it, and drives the browser by its DevTools protocol.
"""

import base64
import io
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from PIL import Image
from websockets.sync.client import ClientConnection, connect

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "images"
WIDE, NARROW = (1280, 900), (390, 844)
MOST_BYTES = 300_000
SECONDS_TO_DRAW = 6.0
CLOSE_PANELS = """
for (const button of document.querySelectorAll('button[aria-label*="lose" i]')) button.click()
"""
"""MLflow opens its pages beside a panel of its assistant."""
RUNS = (("seed=1",), ("seed=2", "training.epochs=4", "training.validate_every_steps=10"))
"""Overrides of the two trainings."""


class Browser:
    """A headless Chromium with one page."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder, self.numbers = program, folder, itertools.count(1)

    @contextmanager
    def open(self) -> Iterator["Browser"]:
        """Starts it, and ends it with the block."""
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
        process = subprocess.Popen(
            [self.program, *words, f"--user-data-dir={self.folder}", "about:blank"], stderr=subprocess.DEVNULL
        )
        try:
            note = self.folder / "DevToolsActivePort"
            wait_for(note.exists, "the browser")
            port = note.read_text(encoding="utf-8").split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                address = next(one["webSocketDebuggerUrl"] for one in json.load(answer) if one["type"] == "page")
            with connect(address, max_size=None) as self.page:
                yield self
        finally:
            process.terminate()
            process.wait(30)

    page: ClientConnection

    def ask(self, method: str, **parameters: Any) -> Mapping[str, Any]:
        """Sends a command and returns its result."""
        number = next(self.numbers)
        self.page.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self.page.recv())
            if answer.get("id") == number:
                return dict(answer.get("result", {}))

    def visit(self, address: str, seconds: float = SECONDS_TO_DRAW) -> None:
        """Opens a page and gives it time to draw itself."""
        self.ask("Page.navigate", url="about:blank")  # otherwise a page that only changes its part after # stays
        self.ask("Page.navigate", url=address)
        time.sleep(seconds)

    def run(self, script: str) -> None:
        """Runs JavaScript in the page."""
        self.ask("Runtime.evaluate", expression=script)

    def take(self, address: str, name: str, size: tuple[int, int] = WIDE, script: str = "") -> None:
        """Saves a picture of a page.

        Args:
            script: JavaScript to run first.
        """
        width, height = size
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.visit(address)
        self.run(CLOSE_PANELS)
        time.sleep(1.0)
        if script:
            self.run(script)
            time.sleep(1.0)
        picture = base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])
        path = FOLDER / f"{name}.png"
        path.write_bytes(shrink(picture))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes", flush=True)


def shrink(picture: bytes) -> bytes:
    """Returns a PNG of at most `MOST_BYTES`, with a palette where the colours of a screen need no more."""
    with Image.open(io.BytesIO(picture)) as image:
        for colours in (256, 128, 64, 32):
            with io.BytesIO() as file:
                few = image.convert("RGB").quantize(colours, dither=Image.Dither.NONE)
                few.save(file, format="png", optimize=True)
                found = file.getvalue()
            if len(found) <= MOST_BYTES:
                break
    return found


def wait_for(ready: Any, what: str, seconds: float = 180.0) -> None:
    """Waits until a function returns true."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if ready():
            return
        time.sleep(0.2)
    sys.exit(f"error: {what} did not start within {seconds:.0f} seconds")


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(home: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Runs Prefect and MLflow over a home. Yields their addresses."""
    prefect, mlflow = free_port(), free_port()
    words = ["-m", "flows.ui", str(home), f"prefect_port={prefect}", f"mlflow_port={mlflow}"]
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    try:
        wait_for((home / "ui" / "mlflow_address").exists, "the servers")
        yield f"http://127.0.0.1:{prefect}", f"http://127.0.0.1:{mlflow}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def run(*words: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs a command and returns its result line."""
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def read(address: str, secret: str, body: Mapping[str, Any]) -> Any:
    """Posts to Prefect's API and returns its answer."""
    client = "screenshots"
    headers = {"Authorization": f"Basic {secret}", "Content-Type": "application/json", "Prefect-Csrf-Client": client}
    asked = urllib.request.Request(f"{address.rsplit('/api/')[0]}/api/csrf-token?client={client}", headers=headers)
    with suppress(OSError), urllib.request.urlopen(asked) as answer:
        headers["Prefect-Csrf-Token"] = json.load(answer)["token"]
    with urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


def main() -> None:
    """Makes all screenshots."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        sys.exit("error: no Chromium found. Install one, or name it: CHROMIUM=/path/to/chromium.")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(os.environ.get("SCREENSHOTS_HOME", f"{folder}/home"))
        environment = {**os.environ, "DLRM_HOME": str(home)}
        for words in RUNS:
            model = run("flows.end_to_end", "configs/smoke.yaml", *words, environment=environment)
        report = run("flows.report", "configs/smoke.yaml", "run=2", "against=1", environment=environment)
        alone = run("flows.report", "configs/smoke.yaml", "run=2", environment=environment)
        with (
            serving(home, environment) as (prefect, mlflow),
            Browser(program, Path(folder) / "browser").open() as browser,
        ):
            browser.take(f"file://{alone['path']}", "report")
            browser.take(f"file://{alone['path']}", "report_narrow", NARROW)
            browser.take(f"file://{report['path']}", "report_two")
            runs, experiment = report["runs"], f"{mlflow}/#/experiments/1"
            browser.take(f"{experiment}/runs?compareRunsMode=TABLE", "mlflow_runs")
            browser.take(f"{experiment}/runs/{model['mlflow_run_id']}", "mlflow_run")
            both = "%2C".join(f"%22{one}%22" for one in runs)
            browser.take(f"{mlflow}/#/compare-runs?runs=%5B{both}%5D&experiments=%5B%221%22%5D", "mlflow_compare")
            browser.take(f"{mlflow}/#/models/smoke", "mlflow_model")
            secret = base64.b64encode((home / "prefect" / "auth").read_text(encoding="utf-8").strip().encode()).decode()
            browser.visit(prefect)
            browser.run(f"localStorage.setItem('prefect-password', '{secret}')")
            browser.take(f"{prefect}/runs", "prefect_runs")
            found = read(f"{prefect}/api/flow_runs/filter", secret, {"sort": "START_TIME_DESC", "limit": 20})
            last = next(one for one in found if one["name"].startswith("end-to-end"))
            browser.take(f"{prefect}/runs/flow-run/{last['id']}", "prefect_run")


if __name__ == "__main__":
    main()
