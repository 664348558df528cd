"""Commands: each file is one, and a Prefect flow."""

import sys

if tuple(sys.version_info) < (3, 11):  # before anything that an older Python cannot read
    found = ".".join(map(str, sys.version_info[:3]))
    remedy = "Use .venv/bin/python, which `make setup` makes."
    sys.exit(f"error: {sys.executable}: expected Python 3.11, 3.12 or 3.13, got {found}. {remedy}")
