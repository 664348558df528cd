"""Authentication at the Prefect servers that we start. Whoever can read the authentication string has access.

Loopback alone keeps nobody out. Every user of this machine can reach a port there, and so can a page in a browser.

`python -m flows.runtime.access COMMAND ...` runs a command that authenticates at the server of our own home. For
flows.doctor, this module imports only the standard library.
"""

import base64
import fcntl
import http.client
import os
import secrets
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from flows.runtime.environment import keep_private, read_profile
from pipeline.errors import ConfigError, ContractError

VARIABLE = "PREFECT_API_AUTH_STRING"
SERVERS = "PREFECT_SERVER_API_AUTH_STRING"
"""The same string, in the settings of a server."""
OTHERS = ("PREFECT_API_KEY", "PREFECT_CLIENT_CUSTOM_HEADERS")
"""Settings with which Prefect's client authenticates in another way."""
NO_HTTP = (ValueError, http.client.HTTPException, OverflowError, MemoryError)
"""What urllib raises if the address is none, or what answers there speaks no HTTP or promises a body without end."""
ANSWER_SECONDS = 5.0
HOST = "127.0.0.1"
"""Where our servers listen. `localhost` may mean ::1, where somebody else can listen."""


def make_secret() -> str:
    """Returns a new authentication string, in the form that Prefect asks for."""
    return f"dlrm:{secrets.token_urlsafe(32)}"


def protect(secret: str, *origins: str) -> dict[str, str]:
    """Returns the variables of a server that requires the secret.

    Args:
        origins: Origins of the web pages that may call it from a browser. They must send the secret, too.
    """
    return {
        SERVERS: secret,
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(origins),
    }


def secret_file(folder: Path) -> Path:
    """Returns the file with the secret of the home's `make ui` server. Creates it if it is missing.

    Args:
        folder: Folder of Prefect's data in the home.
    """
    path = folder / "auth"
    if not path.exists():
        draft = folder / f"auth.{os.getpid()}"
        with open(os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(make_secret() + "\n")
        with suppress(FileExistsError):  # another process was first
            os.link(draft, path)
        draft.unlink()
    return path


def read_secret(folder: Path) -> str:
    """Returns the secret of the home's `make ui` server: the user's setting, or that of the home.

    Raises:
        ConfigError: If this user may not read it, or the file is damaged.
    """
    chosen: str | None = read_setting(SERVERS)
    if chosen is not None:
        return chosen
    path = secret_file(folder)
    try:
        return path.read_text(encoding="utf-8").strip()
    except PermissionError:
        remedy = "Ask its owner to let your group read it, or use a home of your own: DLRM_HOME."
        raise ConfigError(f"authentication string '{path}'", "a readable file", "another user's", remedy) from None
    except UnicodeDecodeError:
        remedy = "Stop `make ui` and remove the file: its next start makes a new one."
        raise ConfigError(f"authentication string '{path}'", "text", "other bytes", remedy) from None


@contextmanager
def serving(folder: Path, port: int) -> Iterator[None]:
    """Marks a port of this machine as the home's own server, until the block or the process ends.

    The mark has the number of this user. Until a process of this user listens there, somebody else may bind the port.
    """
    with _mark(folder, port).open("w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(f"{os.getuid()}")
        file.flush()
        yield


def _mark(folder: Path, port: int | str) -> Path:
    return folder / f"server-{socket.gethostname()}-{port}.lock"


def listens(user: int, port: int) -> bool:
    """Whether a process of a user listens at a port of HOST, as the kernel says: it keeps the maker of each socket.

    Source:
        proc(5), /proc/net/tcp: local address in the bytes of the machine, state 0A (listening), user.
    """
    place = f"{int.from_bytes(socket.inet_aton(HOST), sys.byteorder):08X}:{port:04X}"
    try:
        lines = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    except OSError:
        return False
    return any((line[1], line[3], line[7]) == (place, "0A", f"{user}") for line in lines)


def _is_own(folder: Path, port: int) -> bool:
    """Whether the home's own server listens at a port: it is marked, and its listener is of the user of the mark."""
    mark = _mark(folder, port)
    try:
        return is_held(mark) and listens(int(mark.read_text(encoding="ascii")), port)
    except (OSError, ValueError):
        return False


def find_own_server(home: Path) -> str | None:
    """Returns the address of the Prefect server that `make ui` runs for a home on this machine. None: it runs none."""
    for lock in (home / "prefect").glob(_mark(Path(), "*").name):
        port = lock.stem.rpartition("-")[2]
        address = f"http://{HOST}:{port}/api"
        if port.isdecimal() and _is_own(home / "prefect", int(port)) and answers(address):
            return address
    return None


def answers(address: str) -> bool:
    """Whether a server listens at the address of an API."""
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/health", timeout=ANSWER_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError as error:  # a busy server is one, too
        return isinstance(getattr(error, "reason", error), TimeoutError)
    except NO_HTTP:
        return False


def require_server(*homes: Path) -> str:
    """Returns the address of the server to use: the one in the environment, or that of one of the homes.

    Raises:
        ConfigError: If there is none.
    """
    address = server_address() or next(filter(None, map(find_own_server, homes)), None)
    if address is None:
        remedy = "Start one with `make ui`, or name another one's: export PREFECT_API_URL=http://HOST:PORT/api."
        raise ConfigError("PREFECT_API_URL", "the address of a running server", "none", remedy)
    return address


def server_address() -> str | None:
    """Returns the address of the Prefect server in the environment or in Prefect's settings, or None."""
    address: str | None = read_setting("PREFECT_API_URL")
    return address


def read_setting(name: str) -> Any:
    """Returns a setting from the environment or from Prefect's settings, or None."""
    if "prefect" not in sys.modules and name not in read_profile()[1]:  # otherwise this process may have changed it
        return os.environ.get(name) or None
    import prefect.settings  # knows which profile is active

    return getattr(prefect.settings, name).value() or None


def authenticates_otherwise() -> bool:
    """Whether the user has set another way to authenticate, such as Prefect Cloud's key or a proxy's header."""
    return any(read_setting(name) for name in OTHERS)


def find_secret(address: str, *homes: Path) -> str | None:
    """Returns the secret for a server: the user's own, or that of the home that runs the server.

    Returns None for any other server, because it must not learn our secret. Nor for one that has bound the port of a
    marked server before that could.

    Raises:
        ConfigError: If the address is invalid, or the user has set the secret of one of the homes and the server is not
            that home's.
    """
    try:
        host, port = urlsplit(address).hostname, urlsplit(address).port
    except ValueError as error:
        raise ConfigError("PREFECT_API_URL", "the address of a server", f"{error}", "Correct it.") from None
    folders = [home / "prefect" for home in homes]
    serving = [folder for folder in folders if host == HOST and port and _is_own(folder, port)]
    given = os.environ.get(VARIABLE)
    if given is None:
        return read_secret(serving[0]) if serving else None
    if not serving and given in [_read_quietly(folder / "auth") for folder in folders]:
        remedy = f"Set PREFECT_API_URL as `make ui` prints it, while that runs. For another server, unset {VARIABLE}."
        raise ConfigError(f"{VARIABLE} for {address}", "a string for that server", "the one of this home", remedy)
    return given


def _read_quietly(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def is_held(lock: Path) -> bool:
    """Whether a process holds a lock. The kernel releases it when that process ends."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def header(secret: str | None) -> dict[str, str]:
    """Returns the HTTP header that authenticates."""
    if secret is None:
        return {}
    coded = base64.b64encode(secret.encode(errors="surrogateescape"))  # a variable may hold any bytes
    return {"Authorization": f"Basic {coded.decode()}"}


def check_access(address: str, secret: str | None) -> None:
    """Asks a server whether it accepts the secret. Ignores all other problems of the server.

    Users who authenticate in another way are not asked for a secret.

    Raises:
        ConfigError: If it does not accept it.
    """
    if authenticates_otherwise():
        return
    try:
        request = urllib.request.Request(f"{address.rstrip('/')}/admin/version", headers=header(secret))
        with urllib.request.urlopen(request, timeout=5):
            pass
    except urllib.error.HTTPError as error:
        if error.code == 401:
            remedy = f"Set {VARIABLE}. For a server of `make ui`, use the text of the file that it names."
            given = "none" if secret is None else "another one"
            raise ConfigError(f"server at {address}", "its authentication string", given, remedy) from None
    except (OSError, *NO_HTTP):
        pass


@contextmanager
def authenticated(address: str, *homes: Path) -> Iterator[None]:
    """Makes Prefect use a server and authenticate there, in this process and in its child processes.

    Raises:
        ConfigError: If the server does not run, or does not accept our secret.
    """
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    secret = find_secret(address, *homes) or PREFECT_API_AUTH_STRING.value()  # a profile may have it, too
    _check_server(address, secret)
    wanted = {"PREFECT_API_URL": address} | ({} if secret is None else {VARIABLE: secret})
    settings = {PREFECT_API_URL: address} | ({} if secret is None else {PREFECT_API_AUTH_STRING: secret})
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        with temporary_settings(settings):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _check_server(address: str, secret: str | None) -> None:
    if not authenticates_otherwise() and not answers(address):
        remedy = "Start it, as with `make ui`, or unset PREFECT_API_URL: commands then find or start one of their home."
        raise ConfigError(f"PREFECT_API_URL {address}", "a running Prefect server", "no answer", remedy)
    check_access(address, secret)


def main(words: Sequence[str]) -> NoReturn:
    """Replaces this process by the command, with the authentication string in its environment."""
    from pipeline.config.files import home_path

    keep_private()  # a worker's runs inherit it
    home = home_path(".dlrm")
    try:
        address = require_server(home)
        secret = find_secret(address, home) or read_setting(VARIABLE)
        _check_server(address, secret)
    except ContractError as error:
        sys.exit(f"error: {error}")
    own = {"PREFECT_API_URL": address} | ({} if secret is None else {VARIABLE: secret})
    os.execvpe(words[0], list(words), os.environ | own)


if __name__ == "__main__":
    main(sys.argv[1:])
