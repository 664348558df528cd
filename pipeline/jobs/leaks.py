"""Refuses sources of features that have the label of a row before it is known, by the files that they read."""

from contextlib import suppress
from functools import cache

from pipeline.config.files import ROOT
from pipeline.config.rules import Paths, require_known_labels
from pipeline.data.formats.files import address_of, find_files
from pipeline.errors import ConfigError
from pipeline.jobs.workspace import Workspace


def refuse_leaks(workspace: Workspace) -> None:
    """Refuses what the config alone cannot see: other spellings, globs and links of the same files.

    Raises:
        ConfigError: If a joined log has the labels, and no delay.
        StorageError: If an object store cannot be listed.
    """
    config = workspace.config

    @cache
    def find(paths: Paths) -> frozenset[str]:
        with suppress(ConfigError):  # no such files: whoever reads them says so
            return frozenset(map(address_of, find_files(paths or (), ROOT, "path", config.warehouse.catalog)))
        return frozenset()

    def share(one: Paths, other: Paths) -> bool:
        return not find(one).isdisjoint(find(other))

    if config.source.path is not None and (config.features.sources or config.source.lookups):
        require_known_labels(config.name, config.source, config.events, config.features, share)
