"""An S3 server on loopback, for tests of object stores."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.ports import free_port

SERVE = "import sys; from moto.server import main; main(['--host', sys.argv[1], '--port', sys.argv[2]])"
VARIABLES = {
    "s3.endpoint": "AWS_ENDPOINT_URL",
    "s3.region": "AWS_REGION",
    "s3.access-key-id": "AWS_ACCESS_KEY_ID",
    "s3.secret-access-key": "AWS_SECRET_ACCESS_KEY",
}
"""pyiceberg's name of a property -> Amazon's variable."""


class Store(NamedTuple):
    """A bucket of a server that keeps its objects in memory."""

    endpoint: str
    bucket: str

    @property
    def properties(self) -> dict[str, str]:
        """Access to it in pyiceberg's names."""
        return dict(zip(VARIABLES, (self.endpoint, "us-east-1", "user", "secret"), strict=True))

    @property
    def variables(self) -> dict[str, str]:
        """The same as variables of the environment."""
        return {VARIABLES[name]: value for name, value in self.properties.items()}

    def client(self):
        """Amazon's own client, which knows nothing of ours."""
        import boto3

        return boto3.client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1", aws_access_key_id="user",
            aws_secret_access_key="secret",
        )  # fmt: skip

    def upload(self, folder: Path, prefix: str = "") -> None:
        """Puts all files below a folder into the bucket."""
        client = self.client()
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            client.upload_file(str(path), self.bucket, f"{prefix}{path.relative_to(folder)}")


@contextmanager
def serving_objects(folder: Path) -> Iterator[Store]:
    """Runs the server in a process of its own."""
    pytest.importorskip("moto", reason="the S3 server comes with `make setup EXTRAS=objects`")
    port = free_port()
    with (folder / "moto.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, "127.0.0.1", str(port)], stdout=log, stderr=log, env=os.environ
        )
    store = Store(f"http://127.0.0.1:{port}", "logs")
    try:
        limit = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{store.endpoint}/moto-api/", timeout=5)
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > limit:
                    raise AssertionError((folder / "moto.log").read_text()) from None
                time.sleep(0.1)
        store.client().create_bucket(Bucket=store.bucket)
        yield store
    finally:
        process.kill()
        process.wait()
