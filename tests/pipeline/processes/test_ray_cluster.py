"""Who may join a Ray cluster, against a real one."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage.scratch import ScratchFolder

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
JOIN = """
import sys
from pipeline.processes.ray_cluster import join_cluster
try:
    join_cluster(sys.argv[1], {})
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.cluster
def test_a_wrong_token_is_named(tmp_path: Path) -> None:
    """In one line, without Ray's own."""
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 32}
    words = ["start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=1"]
    short = ScratchFolder("dlrm-ray-")  # pytest's own is too long for Ray's sockets
    words += ["--include-dashboard=false", f"--temp-dir={short.name}", "--object-store-memory=80000000"]
    with (tmp_path / "log").open("wb") as log:
        head = subprocess.Popen([*RAY, *words], env=environment, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 120.0
        while "--block" not in (tmp_path / "log").read_text() and time.monotonic() < end and head.poll() is None:
            time.sleep(0.2)
        for given in ({"RAY_AUTH_TOKEN": "b" * 32}, {"RAY_AUTH_MODE": "disabled"}):
            command = [sys.executable, "-c", JOIN, f"127.0.0.1:{port}"]
            done = subprocess.run(command, env=environment | given, capture_output=True, text=True, timeout=120)
            assert done.stderr == (
                f"ConfigError: Ray cluster at '127.0.0.1:{port}': expected the token that it was started with, got "
                "another token, or none. Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as on its nodes.\n"
            )
    finally:
        head.terminate()
        head.wait()
        short.cleanup()
