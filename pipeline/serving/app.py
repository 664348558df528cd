"""The ASGI application of one process: routes, limits, and the version that answers."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

import orjson
import pyarrow as pa

from pipeline.errors import ContractError, InputError
from pipeline.serving.bodies import (
    ARROW,
    JSON,
    PROBABILITY,
    Scores,
    check_outputs,
    parse_json,
    predictions,
    read_arrow,
    read_tensors,
    write_arrow,
)
from pipeline.serving.config import ServedVersion, ServingConfig
from pipeline.serving.metrics import ServerMetrics
from pipeline.serving.row_log import RowLog
from pipeline.serving.scoring_queue import QueueFull, ScoringQueue

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
RETRY_SECONDS = b"1"
Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
log = logging.getLogger("dlrm")


class RankedRows(Protocol):
    """Probabilities of candidates."""

    @property
    def probabilities(self) -> Scores:
        """In the order of the candidates."""

    @property
    def rows(self) -> pa.Table:
        """A raw row for each."""


class RequestModel(Protocol):
    """A loaded version that reads and scores requests. Each method raises InputError for the caller's mistakes."""

    @property
    def columns(self) -> Mapping[str, str]:
        """The raw columns it reads, with their types."""

    def read_invocation(self, body: bytes) -> pa.Table:
        """Returns the rows of a JSON body in MLflow's schema."""

    def table_of(self, rows: Any) -> pa.Table:
        """Converts an Arrow table, or a list per column, to the columns that it reads."""

    def score_rows(self, rows: pa.Table) -> Scores:
        """Returns finite probabilities of converted rows, float64 [N]."""

    def rank(self, user: Any, candidates: Any) -> RankedRows:
        """Scores a user's candidates."""

    def warm_rest(self) -> None:
        """Loads what few requests need. It may take seconds, and is called once the version answers."""


class LoadedVersion(NamedTuple):
    """A version that is ready to answer."""

    version: ServedVersion
    model: RequestModel


class Answer(NamedTuple):
    """What goes back to the caller."""

    status: int
    body: bytes
    kind: str = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()
    version: ServedVersion | None = None
    """The version that made it. None: the one that serves."""


class RequestHead(NamedTuple):
    """A request without its body."""

    path: str
    kind: str
    accept: str
    version: str | None = None
    """The version that has to answer. None: the one that serves."""


class ScoringApp:
    """Answers over HTTP with the version in `current`, which may change at any time: an answer is of one version.

    Args:
        name: The model's name.
        log: Takes the rows that were scored.
    """

    def __init__(self, config: ServingConfig, name: str, metrics: ServerMetrics, log: RowLog | None = None) -> None:
        self.config, self.name, self.metrics, self.row_log = config, name, metrics, log
        self.current: LoadedVersion | None = None
        self.stale: str | None = None
        """Why another version should answer. None: the present one is right."""
        self.queue = ScoringQueue(config.queue)
        allowed = (*LOOPBACK, config.host, *config.hosts)
        self.hosts = {host.lower().encode() for host in allowed} if config.host in LOOPBACK or config.hosts else None
        model = self.model_path = f"/v2/models/{name}"
        self.scoring = {
            "/invocations": self._invocations, "/rank": self._rank, f"{model}/infer": self._infer,
        }  # fmt: skip
        self.reading: dict[str, Callable[[], Answer]] = {
            "/ping": self._health, "/health": self._health, "/version": self._version, "/metrics": self._metrics,
            "/v2": lambda: _json(200, {"name": "dlrm", "version": "2", "extensions": []}),
            "/v2/health/live": lambda: _json(200, {"live": True}),
            "/v2/health/ready": self._ready,
            model: self._metadata,
            f"{model}/ready": self._ready,
        }  # fmt: skip

    def swap(self, loaded: LoadedVersion) -> None:
        """Lets a loaded version answer all requests that are scored from now on."""
        before, self.current = self.current, loaded
        if before is not None:
            self.metrics.processes.labels(before.version.model, before.version.version).set(0)
            self.metrics.reloads.inc()
        self.metrics.processes.labels(loaded.version.model, loaded.version.version).set(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return
        began = time.monotonic()
        path, version_asked = self._split_version(str(scope["path"]))
        answer = await self._answer(scope, path, version_asked, receive, began + self.config.deadline_seconds)
        version = answer.version or (self.current.version if self.current else None)
        headers = [
            (b"content-type", answer.kind.encode()),
            (b"content-length", str(len(answer.body)).encode()),
            (b"x-content-type-options", b"nosniff"),
            *answer.headers,
        ]
        if version is not None:
            headers.append((b"x-model-version", str(version.version).encode()))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else answer.body})
        known = path if path in self.scoring or path in self.reading else "other"
        self.metrics.count(known, str(answer.status)).inc()
        if known in self.scoring:
            self.metrics.time(known).observe(time.monotonic() - began)

    def _split_version(self, path: str) -> tuple[str, str | None]:
        """Returns the path without a version, and the version that it names."""
        prefix = f"{self.model_path}/versions/"
        if not path.startswith(prefix):
            return path, None
        version, _, rest = path.removeprefix(prefix).partition("/")
        return (f"{self.model_path}/{rest}" if rest else self.model_path), version

    def _other_version(self, path: str, asked: str | None) -> Answer | None:
        """Refuses a request for a version that does not serve."""
        if asked is None or self.current is None or asked == str(self.current.version.version):
            return None
        message = f"version '{asked:.80}': expected {self.current.version.version}, which serves. Ask for that one."
        return self._failure(path, 404, "NOT_FOUND", message)

    async def _answer(self, scope: Scope, path: str, version: str | None, receive: Receive, deadline: float) -> Answer:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        refused = self._refuse_strangers(headers)
        if refused is not None:
            return refused
        score = self.scoring.get(path)
        try:
            if score is not None:
                if scope["method"] != "POST":
                    return self._allow(path, b"POST")
                return await self._score(path, version, headers, receive, score, deadline)
            read = self.reading.get(path)
            if read is None:
                expected = ", ".join([*self.scoring, *self.reading])
                return self._failure(path, 404, "NOT_FOUND", f"path '{path:.80}': expected one of {expected}.")
            if scope["method"] not in ("GET", "HEAD"):
                return self._allow(path, b"GET, HEAD")
            return self._other_version(path, version) or read()
        except Exception:
            log.exception("%s failed", path)
            message = "The server failed to answer. Its log has the reason."
            return self._failure(path, 500, "INTERNAL_ERROR", message)

    def _refuse_strangers(self, headers: Mapping[bytes, bytes]) -> Answer | None:
        """Refuses what a page in a browser sends. Programs send no origin, and name the server as it is called."""
        if b"origin" in headers:
            return self._failure("", 403, "PERMISSION_DENIED", "Pages in a browser may not call this server.")
        host = headers.get(b"host", b"").lower()
        name = host if host.endswith(b"]") else host.rpartition(b":")[0] or host
        if self.hosts is not None and name not in self.hosts:
            message = f"host '{name.decode('latin-1'):.80}': not a name of this server. Name it with hosts=."
            return self._failure("", 403, "PERMISSION_DENIED", message)
        return None

    async def _score(
        self,
        path: str,
        version: str | None,
        headers: Mapping[bytes, bytes],
        receive: Receive,
        score: Callable[[RequestHead, bytes, LoadedVersion], Answer],
        deadline: float,
    ) -> Answer:
        if self.current is None:
            return self._busy(path, "no version is loaded yet")
        kind, _, options = headers.get(b"content-type", b"").decode("latin-1").lower().partition(";")
        charset = options.strip()
        takes = (JSON, ARROW) if path == "/invocations" else (JSON,)
        if kind.strip() not in takes or charset not in ("", "charset=utf-8", 'charset="utf-8"'):
            message = f"content type: expected {' or '.join(takes)} in UTF-8, got '{kind:.80}'."
            return self._failure(path, 415, "UNSUPPORTED_MEDIA_TYPE", message)
        accept = headers.get(b"accept", b"").decode("latin-1").lower()
        request, counted = RequestHead(path, kind.strip(), accept, version), False
        try:
            body = await self._read_body(headers, receive, deadline)
            if body is None:
                message = f"body: expected at most {self.config.body_bytes:,} bytes, got more. Send fewer rows."
                close = ((b"connection", b"close"),)
                return self._failure(path, 413, "PAYLOAD_TOO_LARGE", message, close)
            self.metrics.queue.inc()
            counted = True
            return await self.queue.run(lambda: self._run(score, request, body), deadline)
        except QueueFull:
            return self._busy(path, f"{self.queue.limit} requests wait")
        except TimeoutError:
            message = f"The request took longer than {self.config.deadline_seconds:g} s. Send fewer rows, or later."
            return self._failure(path, 504, "DEADLINE_EXCEEDED", message)
        finally:
            if counted:
                self.metrics.queue.dec()

    async def _read_body(self, headers: Mapping[bytes, bytes], receive: Receive, deadline: float) -> bytes | None:
        """Returns the body, or None if it is too large."""
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.config.body_bytes:
            return None
        parts: list[bytes] = []
        size = 0
        async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
            while True:
                message = await receive()
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > self.config.body_bytes:
                    return None
                if not message.get("more_body"):  # the end, or the caller is gone
                    return b"".join(parts)

    def _run(
        self, score: Callable[[RequestHead, bytes, LoadedVersion], Answer], request: RequestHead, body: bytes
    ) -> Answer:
        """Runs in the scoring thread."""
        loaded = self.current
        assert loaded is not None, "a version is never taken away"
        other = self._other_version(request.path, request.version)
        if other is not None:
            return other
        try:
            answer = score(request, body, loaded)
        except InputError as error:
            answer = self._failure(request.path, 400, "INVALID_PARAMETER_VALUE", str(error))
        except ContractError as error:  # the plan cannot read a column as it was sent
            answer = self._failure(request.path, 400, "BAD_REQUEST", str(error))
        return answer._replace(version=loaded.version)

    def _scored(self, loaded: LoadedVersion, rows: pa.Table, scores: Scores) -> None:
        self.metrics.rows.inc(len(scores))
        if self.row_log is not None and len(scores):
            self.row_log.add(loaded.version, rows, scores)

    def _invocations(self, request: RequestHead, body: bytes, loaded: LoadedVersion) -> Answer:
        model = loaded.model
        arrow = request.kind == ARROW
        rows = model.table_of(read_arrow(body, self.config.body_bytes)) if arrow else model.read_invocation(body)
        scores = model.score_rows(rows)
        self._scored(loaded, rows, scores)
        if ARROW in request.accept or (arrow and JSON not in request.accept):
            return Answer(200, write_arrow(scores), ARROW)
        return _json(200, {"predictions": predictions(scores)})

    def _rank(self, request: RequestHead, body: bytes, loaded: LoadedVersion) -> Answer:
        sent = parse_json(body)
        if not isinstance(sent, dict) or not {"user", "candidates"} <= sent.keys():
            remedy = 'Send {"user": {column: value}, "candidates": [{column: value}, ...]}.'
            raise InputError("body", "a user and candidates", f"{sent!r:.60}", remedy)
        ranked = loaded.model.rank(sent["user"], sent["candidates"])
        scores = ranked.probabilities
        self.metrics.rows.inc(len(scores))
        if self.row_log is not None and len(scores):
            self.row_log.add(loaded.version, ranked.rows, scores)
        order = (-scores).argsort(kind="stable").tolist()
        return _json(200, {"predictions": predictions(scores), "order": order})

    def _infer(self, request: RequestHead, body: bytes, loaded: LoadedVersion) -> Answer:
        sent = parse_json(body)
        columns = read_tensors(sent, loaded.model.columns)
        check_outputs(sent)
        rows = loaded.model.table_of(columns)
        scores = loaded.model.score_rows(rows)
        self._scored(loaded, rows, scores)
        answer = {
            "model_name": self.name,
            "model_version": str(loaded.version.version),
            "outputs": [{"name": PROBABILITY, "shape": [len(scores)], "datatype": "FP64", "data": scores.tolist()}],
        }
        return _json(200, answer | ({"id": sent["id"]} if isinstance(sent.get("id"), str) else {}))

    def _health(self) -> Answer:
        if self.current is None:
            return self._busy("/ping", "no version is loaded yet")
        health = {"status": "ready" if self.stale is None else "stale", "version": self.current.version.version}
        return _json(200, health if self.stale is None else health | {"reason": self.stale})

    def _ready(self) -> Answer:
        ready = self.current is not None
        return _json(200 if ready else 503, {"name": self.name, "ready": ready})

    def _version(self) -> Answer:
        if self.current is None:
            return self._busy("/version", "no version is loaded yet")
        return _json(200, self.current.version.model_dump())

    def _metrics(self) -> Answer:
        return Answer(200, self.metrics.text(), PLAIN)

    def _metadata(self) -> Answer:
        if self.current is None:
            return self._busy("/v2", "no version is loaded yet")
        inputs = [
            {"name": name, "datatype": _datatype(kind), "shape": [-1, -1] if kind.startswith("list") else [-1]}
            for name, kind in self.current.model.columns.items()
        ]
        outputs = [{"name": "probability", "datatype": "FP64", "shape": [-1]}]
        versions = [str(self.current.version.version)]
        return _json(
            200, {"name": self.name, "versions": versions, "platform": "dlrm", "inputs": inputs, "outputs": outputs}
        )

    def _busy(self, path: str, reason: str) -> Answer:
        headers = ((b"retry-after", RETRY_SECONDS),)
        return self._failure(path, 503, "UNAVAILABLE", f"server: {reason}. Try again.", headers)

    def _allow(self, path: str, methods: bytes) -> Answer:
        message = f"method: expected {methods.decode()} for {path}."
        return self._failure(path, 405, "METHOD_NOT_ALLOWED", message, ((b"allow", methods),))

    def _failure(
        self, path: str, status: int, code: str, message: str, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> Answer:
        """Returns an error, in the form of the protocol that the path belongs to."""
        body = {"error": message} if path.startswith("/v2") else {"error_code": code, "message": message}
        return Answer(status, orjson.dumps(body), headers=headers)


def _json(status: int, value: Any) -> Answer:
    return Answer(status, orjson.dumps(value))


def _datatype(kind: str) -> str:
    if "double" in kind:
        return "FP64"
    return "INT64" if "long" in kind else "BYTES"
