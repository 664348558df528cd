"""Serves a version of the registry, and follows its alias."""
