"""Measurements: each module is a command that states machine, versions and commit beside its figures."""
