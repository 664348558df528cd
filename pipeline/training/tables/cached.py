"""Rows of tables in host memory of which the device keeps copies (`table_memory: uvm_caching`)."""

from torch import nn

from pipeline.training.tables.sharding import iter_lookups


def flush_cache(model: nn.Module) -> None:
    """Puts rows that were trained on the device into their tables; weights are read after this."""
    for lookup in iter_lookups(model):
        lookup.flush()


def drop_cache(model: nn.Module) -> None:
    """Lets go of the device's copies; called after weights were written, which the copies would hide and undo."""
    for lookup in iter_lookups(model):
        lookup.purge()
