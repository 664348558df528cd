"""Recognizes transient failures: an unreachable service, a lock, another writer."""

import errno
from typing import TypeGuard

from storage.errors import ConflictError

NETWORK = {
    errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT,
    errno.EPIPE,
}  # fmt: skip
SERVICES = {
    "pyiceberg.exceptions": ("ServiceUnavailableError", "ServerError", "CommitStateUnknownException"),
    "httpx": ("TransportError",),
    "botocore.exceptions": ("ConnectionError", "HTTPClientError"),
}
"""Module -> exceptions of an unreachable service. By name, because a command may not have loaded the library."""
STORE = (
    "AWS Error SLOW_DOWN", "AWS Error SERVICE_UNAVAILABLE", "AWS Error NETWORK_CONNECTION", "AWS Error THROTTLING",
    "AWS Error INTERNAL_FAILURE", "AWS Error REQUEST_TIMEOUT", "HTTP status 5",
    "database is locked", "Connection refused", "timed out",
)  # fmt: skip
"""Parts of messages of object stores and databases, which have no classes of their own for this."""
CALLERS = ("sqlalchemy", "mlflow", "sqlite3", "_duckdb")
"""Modules of errors, other than OSError, that have such messages."""


def is_transient(error: BaseException) -> bool:
    """Tells whether a failure is transient: the same work may succeed later by itself.

    Wrong configs, missing or damaged data, full disks and missing permissions are not transient.

    Example:
        >>> is_transient(ConnectionResetError(errno.ECONNRESET, "reset")), is_transient(OSError(errno.ENOSPC, "full"))
        (True, False)
    """
    from pipeline.errors import AccessError, ContractError, TrackingError

    if isinstance(error, AccessError):
        return False
    if isinstance(error, ConflictError | TrackingError | ConnectionError | TimeoutError):
        return True
    if isinstance(error, ContractError):
        return error.__cause__ is not None and is_transient(error.__cause__)
    if _is_request_lost(error):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in NETWORK
    kinds = {(kind.__module__, kind.__name__) for kind in type(error).__mro__}
    if any((module, name) in kinds for module, names in SERVICES.items() for name in names):
        return True
    is_store = isinstance(error, OSError) or type(error).__module__.startswith(CALLERS)
    return is_store and any(part in str(error) for part in STORE)


def _is_request_lost(error: BaseException) -> bool:
    """Whether an error of a request means that the server cannot be reached at present. MLflow takes long to load."""
    if not _is_of_request(error):
        return False
    from pipeline.registration.tracking import is_denied, is_unreachable

    return is_unreachable(error) and not is_denied(error)


def _is_of_request(error: BaseException) -> TypeGuard[Exception]:
    """Whether an error is of MLflow's client, or of the library with which it asks."""
    return isinstance(error, Exception) and type(error).__module__.startswith(("mlflow.", "requests."))


def explain_request(error: Exception) -> Exception:
    """Returns one sentence for an error of MLflow's client, which keeps what was finished before it.

    Any other error is returned as it is.
    """
    if not _is_of_request(error):
        return error
    from pipeline.registration.tracking import explain

    told = explain(error)
    vars(told).update({name: value for name, value in vars(error).items() if name == "finished"})
    return told
