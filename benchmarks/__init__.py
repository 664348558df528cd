"""Measurements. Each module is a command that prints its figures with machine, versions and commit."""
