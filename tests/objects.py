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

from tests.ceph import serving_ceph
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
    """Runs a server in processes of its own: moto's, or Ceph's gateway where `DLRM_TEST_STORE` says `ceph`."""
    with serving_ceph(folder / "ceph") if os.environ.get("DLRM_TEST_STORE") == "ceph" else _serving_moto(folder) as one:
        store = Store(one, "logs")
        store.client().create_bucket(Bucket=store.bucket)
        yield store


@contextmanager
def _serving_moto(folder: Path) -> Iterator[str]:
    pytest.importorskip("moto", reason="the S3 server comes with `make setup EXTRAS=objects`")
    port = free_port()
    with (folder / "moto.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, "127.0.0.1", str(port)], stdout=log, stderr=log, env=os.environ
        )
    endpoint = f"http://127.0.0.1:{port}"
    try:
        limit = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"{endpoint}/moto-api/", timeout=5)
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > limit:
                    raise AssertionError((folder / "moto.log").read_text()) from None
                time.sleep(0.1)
        yield endpoint
    finally:
        process.kill()
        process.wait()
