"""Ceph's object gateway on loopback, with a monitor and a store in memory: an S3 server that is nobody's mock.

    python -m tests.ceph

makes a bucket `tables`, prints variables for the environment and runs until it is interrupted. `DLRM_TEST_STORE=ceph` makes the tests of object
stores use it in place of moto. The programs come from Debian: `ceph-mon`, `ceph-osd`, `radosgw`, `ceph-common`.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pipeline.processes.process import die_with_parent
from tests.ports import free_port

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
USER, SECRET = "user", "secret"
CONFIG = """
[global]
fsid = {fsid}
mon_initial_members = a
mon_host = v2:127.0.0.1:{monitor}
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
keyring = {folder}/keyring
run_dir = {folder}
admin_socket = {folder}/$name.$pid.asok
log_file = {folder}/$name.log
mon_data = {folder}/mon
osd_data = {folder}/osd
rgw_data = {folder}/rgw
rgw_frontends = beast endpoint=127.0.0.1:{gateway} tcp_nodelay=1
osd_objectstore = memstore
memstore_device_bytes = 8589934592
osd_crush_update_on_start = false
osd_crush_chooseleaf_type = 0
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
mon_data_avail_crit = 1
mon_data_avail_warn = 2
"""
ALL = ("--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *")


@contextmanager
def serving_ceph(folder: Path) -> Iterator[str]:
    """Runs the three servers. Yields the address of the gateway."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise RuntimeError(f"{', '.join(missing)}: install ceph-mon, ceph-osd, radosgw and ceph-common")
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir(parents=True)
    port, path, servers = free_port(), folder / "ceph.conf", list[subprocess.Popen[bytes]]()
    monitor, fsid, disk = free_port(), str(uuid.uuid4()), str(uuid.uuid4())
    path.write_text(CONFIG.format(fsid=fsid, folder=folder, monitor=monitor, gateway=port))

    def run(program: str, *words: str) -> str:
        config = () if program in ("ceph-authtool", "monmaptool") else ("-c", str(path))
        done = subprocess.run(
            [program, *config, *words], cwd=folder, timeout=60, check=True, capture_output=True, text=True
        )
        return done.stdout

    def serve(program: str, *words: str) -> None:
        with (folder / f"{program}.out").open("wb") as output:
            command = [program, "-c", str(path), "-f", *words]
            prepare = partial(die_with_parent, os.getpid(), signal.SIGKILL)
            servers.append(subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, preexec_fn=prepare))

    run("ceph-authtool", "--create-keyring", "keyring", "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    run("ceph-authtool", "keyring", "--gen-key", "-n", "client.admin", *ALL)
    run("ceph-authtool", "keyring", "--gen-key", "-n", "osd.0", *ALL[:3], *ALL[3:6])
    run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{monitor}]", "monmap")
    run("ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap", "--keyring", "keyring")
    try:
        serve("ceph-mon", "-i", "a")
        run("ceph", "osd", "new", disk)
        run("ceph", "auth", "import", "-i", "keyring")
        run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        serve("ceph-osd", "-i", "0")
        run("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=here")
        serve("radosgw", "-n", "client.admin")
        address, limit = f"http://127.0.0.1:{port}", time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(address, timeout=5)
                break
            except OSError:
                if any(server.poll() is not None for server in servers) or time.monotonic() > limit:
                    raise AssertionError((folder / "radosgw.out").read_text()) from None
                time.sleep(0.1)
        run("radosgw-admin", "-n", "client.admin", "user", "create", f"--uid={USER}", "--display-name=tester",
            f"--access-key={USER}", f"--secret-key={SECRET}")  # fmt: skip
        yield address
    finally:
        for server in reversed(servers):
            server.kill()
            server.wait()


def main() -> None:
    """Runs the servers until the process is interrupted."""
    from tests.objects import Store

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="ceph-") as folder, serving_ceph(Path(folder) / "ceph") as endpoint:
        Store(endpoint, "tables").client().create_bucket(Bucket="tables")
        print(f"export AWS_ENDPOINT_URL={endpoint} AWS_REGION=us-east-1", flush=True)
        print(f"export AWS_ACCESS_KEY_ID={USER} AWS_SECRET_ACCESS_KEY={SECRET}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
