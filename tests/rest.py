"""A REST catalog on loopback, for tests: `python -m tests.rest PORT FOLDER`.

It speaks the protocol over HTTP and keeps its tables in pyiceberg's SQL catalog. Clients see what a server of the
Iceberg project would send them: metadata, conflicts as 409, and no part of the SQL catalog's code.
"""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastapi
import uvicorn
from pyiceberg.catalog.rest import CreateTableRequest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import CommitTableRequest, Table
from starlette.responses import JSONResponse, Response

from tests.ports import free_port

CODES: dict[type[Exception], int] = {
    NoSuchTableError: 404, NoSuchNamespaceError: 404, CommitFailedException: 409, TableAlreadyExistsError: 409,
    NamespaceAlreadyExistsError: 409,
}  # fmt: skip
TOKEN = "token-of-the-catalog"


def _json(content: Any) -> Response:
    text = content if isinstance(content, str) else content.model_dump_json(by_alias=True)
    return Response(text, media_type="application/json")


def _table(table: Table) -> Response:
    metadata = table.metadata.model_dump_json()
    return _json(f'{{"metadata-location": "{table.metadata_location}", "metadata": {metadata}, "config": {{}}}}')


def make_app(catalog: SqlCatalog) -> fastapi.FastAPI:
    """Serves a catalog."""
    app = fastapi.FastAPI()

    @app.middleware("http")
    async def check_token(request: fastapi.Request, handle: Any) -> Any:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            error = {"message": "Not authorized", "type": "NotAuthorizedException", "code": 401}
            return JSONResponse({"error": error}, 401)
        return await handle(request)

    def refuse(request: fastapi.Request, error: Exception) -> Response:
        code = next(code for kind, code in CODES.items() if isinstance(error, kind))
        return JSONResponse({"error": {"message": f"{error}", "type": type(error).__name__, "code": code}}, code)

    for kind in CODES:
        app.add_exception_handler(kind, refuse)

    @app.get("/v1/config")
    def config() -> Any:
        return {"defaults": {}, "overrides": {}}

    @app.get("/v1/namespaces")
    def namespaces() -> Any:
        return {"namespaces": catalog.list_namespaces()}

    @app.post("/v1/namespaces")
    async def create_namespace(request: fastapi.Request) -> Any:
        given = await request.json()
        catalog.create_namespace(tuple(given["namespace"]))
        return {"namespace": given["namespace"], "properties": {}}

    @app.api_route("/v1/namespaces/{name}", methods=["GET", "HEAD"])
    def namespace(name: str) -> Any:
        return {"namespace": [name], "properties": catalog.load_namespace_properties(name)}

    @app.get("/v1/namespaces/{name}/tables")
    def tables(name: str) -> Any:
        return {"identifiers": [{"namespace": [name], "name": row[-1]} for row in catalog.list_tables(name)]}

    @app.post("/v1/namespaces/{name}/tables")
    async def create(name: str, request: fastapi.Request) -> Response:
        absent = {"location": None, "partition-spec": None, "write-order": None}
        given = CreateTableRequest.model_validate(absent | await request.json())
        if catalog.table_exists((name, given.name)):
            raise TableAlreadyExistsError(given.name)
        make = catalog._create_staged_table if given.stage_create else catalog.create_table
        return _table(
            make(
                (name, given.name), given.table_schema, given.location, given.partition_spec, given.write_order,
                given.properties,
            )
        )  # fmt: skip

    @app.get("/v1/namespaces/{name}/tables/{table}")
    def load(name: str, table: str) -> Response:
        return _table(catalog.load_table((name, table)))

    @app.head("/v1/namespaces/{name}/tables/{table}")
    def exists(name: str, table: str) -> Response:
        return Response(status_code=204 if catalog.table_exists((name, table)) else 404)

    @app.delete("/v1/namespaces/{name}/tables/{table}")
    def drop(name: str, table: str) -> Response:
        catalog.drop_table((name, table))
        return Response(status_code=204)

    @app.post("/v1/namespaces/{name}/tables/{table}")
    async def commit(name: str, table: str, request: fastapi.Request) -> Response:
        given = CommitTableRequest.model_validate_json(await request.body())
        target: Any = SimpleNamespace(name=lambda: (name, table))
        return _json(catalog.commit_table(target, given.requirements, given.updates))

    return app


@contextmanager
def serving_catalog(folder: Path) -> Iterator[dict[str, str]]:
    """Runs a server in a process of its own. Yields the catalog's properties."""
    port = free_port()
    with (folder / "rest.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "tests.rest", f"{port}", f"{folder}"], stdout=log, stderr=log)
    uri = f"http://127.0.0.1:{port}"
    try:
        limit = time.monotonic() + 240
        while True:
            try:
                request = urllib.request.Request(f"{uri}/v1/config", headers={"Authorization": f"Bearer {TOKEN}"})
                urllib.request.urlopen(request, timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "rest.log").read_text()
                assert time.monotonic() < limit
                time.sleep(0.1)
        yield {"type": "rest", "uri": uri, "token": TOKEN}
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    """Serves until it is ended."""
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    catalog = SqlCatalog(
        "behind",
        uri=f"sqlite:///{folder}/rest.db",
        warehouse=f"file://{folder}/tables",
        pool_size="1",
        max_overflow="0",
    )
    uvicorn.run(make_app(catalog), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
