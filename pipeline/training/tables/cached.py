"""Device caches of tables in host memory (`table_memory: uvm_caching`)."""

from torch import nn

from pipeline.training.tables.sharding import iter_lookups


def flush_cache(model: nn.Module) -> None:
    """Writes rows that were trained in the device's cache back to their tables. Call it before reading weights."""
    for lookup in iter_lookups(model):
        lookup.flush()


def drop_cache(model: nn.Module) -> None:
    """Drops the device's cached rows. Call it after writing weights, which cached rows would hide and overwrite."""
    for lookup in iter_lookups(model):
        lookup.purge()
