"""What numba gives under private names only."""

from typing import Any

from numba.core.caching import Cache, FunctionCache, IndexDataCacheFile
from numba.core.dispatcher import Dispatcher

from storage.errors import require_private

require_private(
    "numba", "0.68.", {Cache: ["_cache_file"], Dispatcher: ["_cache"], IndexDataCacheFile: ["_source_stamp"]}
)


def add_stamp(loop: Any, stamp: str) -> None:
    """Lets the code of a loop on the disk be fresh only if a stamp is the same, beside time and size of its file."""
    if isinstance(loop._cache, FunctionCache):
        file = loop._cache._cache_file
        file._source_stamp = (file._source_stamp, stamp)
