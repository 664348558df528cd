"""The fixtures of an ingest, which reads files as everything else does."""

from tests.pipeline.extraction.conftest import ingest, put, stored, warehouse

__all__ = ["ingest", "put", "stored", "warehouse"]
