"""What numba gives under private names only."""

from typing import Any

from storage.errors import importing_private, require_private

VERSION = "0.68."
with importing_private("numba", VERSION):
    from numba.core.caching import Cache, FunctionCache, IndexDataCacheFile
    from numba.core.dispatcher import Dispatcher

require_private(
    "numba", VERSION, {Cache: ["_cache_file"], Dispatcher: ["_cache"], IndexDataCacheFile: ["_source_stamp"]}
)


def add_stamp(loop: Any, stamp: str) -> None:
    """Lets the code of a loop on the disk be fresh only if a stamp is the same, beside time and size of its file."""
    cache = getattr(loop, "_cache", None)  # without a compiler, a loop is a plain function
    if isinstance(cache, FunctionCache):
        file = cache._cache_file
        file._source_stamp = (file._source_stamp, stamp)
