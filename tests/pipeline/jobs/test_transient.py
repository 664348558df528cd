"""What may pass by itself is tried again by deployed runs; what will not, is not."""

import errno
from collections.abc import Callable

import pytest
import requests
from mlflow.exceptions import MlflowException, RestException
from pyiceberg.exceptions import ServiceUnavailableError
from sqlalchemy.exc import OperationalError

from flows.runtime import flow
from pipeline.errors import AccessError, ConfigError, DataError, StorageError, TrackingError
from pipeline.jobs.transient import is_transient
from storage.errors import ConflictError

WORDS = ("table 't'", "an answer", "none", "Wait.")


def answered(status: int) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(f"{status}", response=response)


PASSING = [
    answered(503),
    answered(429),
    MlflowException("API request to endpoint /api/2.0/x failed with error code 502 != 200. Response body: '<html>'"),
    TrackingError(*WORDS),
    ConflictError(*WORDS),
    requests.ConnectionError("no route"),
    requests.ReadTimeout("slow"),
    ServiceUnavailableError("the catalog restarts"),
    OSError("When reading from S3: AWS Error NETWORK_CONNECTION during GetObject"),
    OSError("When reading from S3: AWS Error SLOW_DOWN during GetObject"),
    OSError("When reading from S3: AWS Error UNKNOWN (HTTP status 503) during GetObject"),
    MlflowException("API request to http://m/api failed with exception too many 503 error responses"),
    MlflowException("API request to http://m/api failed with exception Connection reset by peer"),
    MlflowException("API request to http://m/api failed with exception Name or service not known"),
    OperationalError("select 1", {}, Exception("database is locked")),
    ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
]
LASTING = [
    ConfigError(*WORDS),
    DataError(*WORDS),
    StorageError(*WORDS),
    OSError(errno.ENOSPC, "No space left on device"),
    PermissionError(errno.EACCES, "denied"),
    FileNotFoundError(errno.ENOENT, "gone"),
    ValueError("timed out"),
    OSError("When reading from S3: AWS Error ACCESS_DENIED during HeadObject operation: No response body."),
    OSError("When reading from S3: AWS Error NO_SUCH_BUCKET during GetObject"),
    OSError("When reading from S3: AWS Error UNKNOWN (HTTP status 403) during GetObject"),
    MlflowException("no such alias"),
    AccessError(*WORDS),
    MlflowException("API request to endpoint /api/2.0/x failed with error code 403 != 200. Response body: '<html>'"),
    MlflowException("API request to http://m/api failed with exception Tunnel connection failed: 403 Forbidden"),
    requests.ConnectionError("Unable to connect to proxy: Tunnel connection failed: 407 Proxy Authentication Required"),
    answered(403),
    answered(404),
    RestException({"error_code": "PERMISSION_DENIED", "message": "no"}),
]


def failing(errors: list[Exception]) -> Callable[[], int]:
    """Returns work that fails with each of these errors in turn, and then gives the number of attempts."""
    left = list(errors)

    def work() -> int:
        if left:
            raise left.pop(0)
        return len(errors) + 1

    return work


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "is_deployed", lambda: True)
    monkeypatch.setattr(flow, "RETRY_DELAYS_SECONDS", (0.0, 0.0, 0.0))


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_a_deployed_run_tries_again_what_may_pass(deployed: None, error: Exception) -> None:
    assert is_transient(error)
    told: list[Exception] = []
    assert flow.try_again(failing([error] * 3), lambda given, error: told.append(error))() == 4
    assert told == [error] * 3, "the next attempt skips what is finished, so it is told of now"
    with pytest.raises(type(error)):
        flow.try_again(failing([error] * 4))()


@pytest.mark.parametrize("error", LASTING, ids=lambda error: type(error).__name__)
def test_what_will_not_pass_ends_a_run_at_once(deployed: None, error: Exception) -> None:
    assert not is_transient(error)
    with pytest.raises(type(error)):
        flow.try_again(failing([error]))()


def test_a_forced_run_is_not_tried_again_since_it_would_repeat_finished_work(deployed: None) -> None:
    starts = []

    def work(config: str, force: bool = False) -> None:
        starts.append(force)
        raise TrackingError(*WORDS)

    for arguments in ({"force": True}, {"force": False}):
        with pytest.raises(TrackingError):
            flow.try_again(work)("demo.yaml", **arguments)
    with pytest.raises(TrackingError):
        flow.try_again(work)("demo.yaml", True)
    assert starts == [True, *[False] * 4, True]


def test_a_command_shows_the_failure_at_once() -> None:
    with pytest.raises(TrackingError):
        flow.try_again(failing([TrackingError(*WORDS)]))()


def test_an_error_of_ours_passes_if_its_cause_does() -> None:
    error = DataError(*WORDS)
    error.__cause__ = ConnectionResetError(errno.ECONNRESET, "reset")
    assert is_transient(error)
