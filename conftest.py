"""Modules that need an extra are looked through for examples only where it is installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("ray") else ["pipeline/preprocessing/ray_executor.py"]
