"""RunConfig and how it is read from YAML files and overrides."""

from pipeline.config.run import RunConfig, load

__all__ = ["RunConfig", "load"]
