"""What storage agrees on with its callers; imports nothing heavy."""

DAY = "day"
"""The partition column of every table, an Iceberg date."""
