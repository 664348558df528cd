"""Starts processes of a module by forking a server that has imported it: the imports are paid once, not per process.

A rank spends five seconds of CPU on imports, a fork milliseconds. The server has imported libraries and used none, so
there are no threads and no state that a fork could break. It ends when the process that started it ends, and its forks
end with it. Where the machine has CUDA devices, the server imports nothing: some libraries look for devices while they
are imported, and CUDA does not survive a fork. Each process imports for itself there.
"""

import atexit
import errno
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fcntl import F_DUPFD_CLOEXEC, F_GETFL, F_SETFL, F_SETOWN, fcntl
from importlib.abc import InspectLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO, Any, cast

from pipeline.processes.process import PACKAGES, ROOT, die_with_parent, loading, set_process_name

READ_AT_LOAD = ("ARROW_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "NUMBA_", "OMP_", "OPENBLAS_", "PYTHON")
"""Prefixes of variables that libraries read when they are loaded."""
READ_LATER = "PYTHONBREAKPOINT"
"""A variable with one of these prefixes that is not read at load. Ray sets it in a process that has started Ray."""
MOST_SERVERS = 4
"""Servers that are kept. One without running processes is stopped where another is needed."""

Key = tuple[Path, tuple[tuple[str, str], ...]]
"""Working directory and variables that are read at load: processes that differ in them have other servers."""


class ForkedProcess:
    """A process that the server forked. The methods are those of `subprocess.Popen`."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid, self.returncode = pid, None
        self._status = status
        self._lock = threading.Lock()

    returncode: int | None
    """Exit code, -N after signal N; None while the process runs."""

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process runs."""
        return self._read(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the process to end and returns its exit code.

        Raises:
            subprocess.TimeoutExpired: If it runs for longer than `timeout` seconds.
        """
        code = self._read(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _read(self, timeout: float | None) -> int | None:
        with self._lock:
            if self.returncode is None and _readable(self._status, timeout=timeout):
                text = os.read(self._status, 16)
                os.close(self._status)
                self.returncode = int(text or -signal.SIGKILL)  # nothing: the server was killed, and its forks with it
            return self.returncode


def _readable(*descriptors: int, timeout: float | None = None) -> list[int]:
    """Waits until descriptors have something to read, or their other end is closed. `select` takes none above 1,023.

    Args:
        timeout: In seconds. None: however long it takes.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poller.poll(None if timeout is None else timeout * 1000)]


class ForkServer:
    """The server's side in the process that started it."""

    def __init__(self, modules: Sequence[str], root: Path, environment: Mapping[str, str]) -> None:
        self.modules, self.key = set(modules), _key(root, environment)
        self.running: list[ForkedProcess] = []
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read_end, self.alive = os.pipe()
        path = os.pathsep.join([str(PACKAGES), *filter(None, [environment.get("PYTHONPATH")])])
        preload = () if any(Path("/dev").glob("nvidia[0-9]*")) else modules
        try:
            with theirs:
                descriptors = (theirs.fileno(), read_end)
                self.process = subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", __spec__.name, *map(str, descriptors), *preload],
                    env={**environment, "PYTHONPATH": path}, cwd=root, pass_fds=descriptors,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
        except OSError:
            self.connection.close()
            os.close(self.alive)
            raise
        finally:
            os.close(read_end)

    def fork(self, request: Mapping[str, Any], log: int, given: Mapping[str, int]) -> ForkedProcess:
        """Forks a process. See `start_process`."""
        status, theirs = os.pipe()
        try:
            with open(os.memfd_create("dlrm-request"), "w") as text:  # an environment may be larger than a message
                json.dump({**request, "given": list(given)}, text)
                text.flush()
                socket.send_fds(self.connection, [b"fork"], [text.fileno(), theirs, log, *given.values()])
            pid = parse_answer(self.connection.recv(1 << 12))
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(theirs)
        process = ForkedProcess(pid, status)
        self.running.append(process)
        return process

    def is_idle(self) -> bool:
        """Says whether none of its processes runs."""
        self.running = [process for process in self.running if process.poll() is None]
        return not self.running

    def stop(self) -> None:
        """Ends the server and all that it forked."""
        self.connection.close()
        os.close(self.alive)
        self.process.kill()
        self.process.wait()


def parse_answer(answer: bytes) -> int:
    """Returns the process id in a server's answer, which is a number.

    Raises:
        ConnectionResetError: If the answer is empty, since the server has ended.
        OSError: If it is below 0: the server could not fork.
    """
    if not answer:
        raise ConnectionResetError("the fork server ended")
    if int(answer) < 0:
        raise OSError(-int(answer), os.strerror(-int(answer)))
    return int(answer)


_servers: list[ForkServer] = []
_lock = threading.Lock()


def start_process(
    module: str,
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    root: Path,
    log: IO[bytes],
    given: Mapping[str, int] | None = None,
) -> ForkedProcess:
    """Runs `python -m module arguments` in a fork of a server that has imported the module.

    The process dies with this one, for whatever reason.

    Args:
        module: The server imports it, so its work must stand under `if __name__ == "__main__"`, and calls its function
            `preload` if it has one.
        name: What `ps -o comm` and `top` show, at most 15 characters.
        environment: All variables of the process.
        root: Its working directory.
        log: Takes its standard output and error.
        given: Variable -> descriptor of this process. The new process finds its copy's number in the variable.
    Raises:
        OSError: If there is no memory or process id left.
    """
    request = {"module": module, "name": name, "arguments": list(arguments), "environment": dict(environment)}
    with _lock:
        for _ in range(2):
            server = _server([module], root, environment)
            try:
                return server.fork(request, log.fileno(), given or {})
            except (BrokenPipeError, ConnectionResetError):
                _forget(server)
            except OSError:  # it has answered
                raise
            except BaseException:  # an interrupt: its answer would be taken for that to the next request
                _forget(server)
                raise
        raise ChildProcessError(errno.ECHILD, f"the server that starts {module} was killed twice")


def prepare(modules: Mapping[str, Mapping[str, str]], root: Path = ROOT) -> None:
    """Starts servers, which import the modules while the caller does other things.

    Args:
        modules: Module -> all variables of its processes. Modules whose variables allow it share a server.
    """
    shared: dict[Key, list[str]] = {}
    for module, environment in modules.items():
        shared.setdefault(_key(root, environment), []).append(module)
    with _lock:
        for together in shared.values():
            _server(together, root, modules[together[0]])


def stop_servers() -> None:
    """Ends all servers and what they forked."""
    with _lock:
        for server in list(_servers):
            _forget(server)


def _key(root: Path, environment: Mapping[str, str]) -> Key:
    read = {name: value for name, value in environment.items() if name.startswith(READ_AT_LOAD)}
    read.pop(READ_LATER, None)
    return root, tuple(sorted(read.items()))


def _server(modules: Sequence[str], root: Path, environment: Mapping[str, str]) -> ForkServer:
    key = _key(root, environment)
    for server in _servers:
        if server.key == key and server.modules.issuperset(modules):
            return server
    idle = [server for server in _servers if server.is_idle()]
    for server in idle[: max(len(_servers) + 1 - MOST_SERVERS, 0)]:
        _forget(server)
    _servers.append(ForkServer(modules, root, environment))
    return _servers[-1]


def _forget(server: ForkServer) -> None:
    _servers.remove(server)
    server.stop()


def serve(connection: socket.socket, modules: Sequence[str]) -> dict[str, Any] | None:
    """Forks on request until the other side is gone. Returns in each fork what it was asked to do."""
    codes: dict[str, CodeType | None] = {}
    with loading():
        for name in modules:
            with suppress(Exception):  # the fork imports it again, and its log shows what is wrong
                codes[name], module = _import(name)
                getattr(module, "preload", lambda: None)()
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the forks; this ends with its parent
    statuses: dict[int, int] = {}
    server = os.getpid()
    while True:
        readable = _readable(connection.fileno(), woken)
        if woken in readable:
            os.read(woken, 1 << 12)
            _report_ended(statuses)
        if connection.fileno() in readable:
            message, descriptors, _, _ = socket.recv_fds(connection, 16, 16)
            if not message:
                return None
            text, status, *kept = descriptors
            with open(text, encoding="utf-8") as file:
                file.seek(0)  # where the writer has left it
                work: dict[str, Any] = json.load(file)
            try:
                pid = os.fork()
            except OSError as error:
                connection.send(b"%d" % -(error.errno or errno.EAGAIN))
                _close([status, *kept])
                continue
            if pid:
                statuses[pid] = status
                connection.send(b"%d" % pid)
                _close(kept)
                continue
            die_with_parent(server)
            _close([woken, wake, status, *statuses.values()])
            connection.close()
            return work | {"descriptors": kept, "code": codes.get(work["module"])}


def _import(name: str) -> tuple[CodeType | None, ModuleType]:
    """Imports a module. Returns its code, too: forks run it, also if the file changes later."""
    spec = importlib.util.find_spec(name)
    code = None if spec is None else cast(InspectLoader, spec.loader).get_code(name)
    return code, importlib.import_module(name)


def _report_ended(statuses: dict[int, int]) -> None:
    """Writes the exit codes of forks that ended into their pipes."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            with suppress(BrokenPipeError):  # nobody asks any more
                os.write(statuses[pid], str(code).encode())
            os.close(statuses.pop(pid))


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def run(work: Mapping[str, Any]) -> None:
    """Becomes the process that was asked for. A module that the server has not imported is read from its file now."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log, *given = work["descriptors"]
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    numbers = dict(zip(work["given"], map(str, given), strict=True))
    os.environ.clear()
    os.environ.update(work["environment"] | numbers)
    set_process_name(work["name"])
    sys.argv[1:] = work["arguments"]
    code = work["code"]
    if code is None:
        runpy.run_module(work["module"], run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__file__ = sys.argv[0] = code.co_filename
        exec(code, vars(main))


def leave(codes: Sequence[int]) -> None:
    """Ends this process without the teardown of its modules, which takes seconds once PyTorch is loaded."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(codes[0] if codes else 1)


def main(connection: int, alive: int, modules: Sequence[str]) -> None:
    """Serves, and runs a module in each fork.

    Args:
        connection: Descriptor of the socket that requests come from.
        alive: Descriptor of a pipe that nobody writes to. The kernel sends SIGIO, which ends this process, when its
            other end is closed: also in the middle of an import.
        modules: What to import before the first fork.
    """
    codes: list[int] = []
    atexit.register(leave, codes)  # registered first, so it runs last
    fcntl(alive, F_SETOWN, os.getpid())
    fcntl(alive, F_SETFL, fcntl(alive, F_GETFL) | os.O_ASYNC)
    if _readable(alive, timeout=0):  # the parent ended before the request
        return
    with socket.socket(fileno=fcntl(connection, F_DUPFD_CLOEXEC, 3)) as ours:
        os.close(connection)
        work = serve(ours, modules)
    if work is None:
        return
    os.close(alive)
    try:
        run(work)
        codes.append(0)
    except SystemExit as left:
        codes.append(left.code if isinstance(left.code, int) else int(left.code is not None))
        raise


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
