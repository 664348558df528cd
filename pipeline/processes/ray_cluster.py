"""Connects this process to a Ray cluster that runs already."""

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from pipeline.errors import ConfigError
from pipeline.processes.process import PACKAGES

ANSWER_SECONDS = 60.0
"""Time limit of the question whether the cluster lets this process in. Ray itself tries for a minute."""


def set_ray_environment() -> None:
    """Sets what Ray reads when it starts or connects."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))  # else Ray stores one in the user's home


def join_cluster(address: str, variables: Mapping[str, str]) -> None:
    """Connects to a cluster, whose processes get our code.

    Args:
        address: As `ray_address` of a config.
        variables: Environment of these processes.
    Raises:
        ConfigError: If the cluster does not answer, or wants another token.
    """
    import ray

    set_ray_environment()
    _require_token(address)
    code = [str(PACKAGES / package) for package in ("pipeline", "storage", "models")]
    environment = {"env_vars": dict(variables), "py_modules": code}
    try:
        ray.init(address=address, runtime_env=environment, log_to_driver=False, logging_level="error")
    except ConnectionError as error:
        raise ConfigError(
            f"Ray cluster at '{address}'", "to answer", f"{error}".split("\n")[0].rstrip("."),
            "See whether it runs (ray status), and correct ray_address.",
        ) from None  # fmt: skip


def _require_token(address: str) -> None:
    """Refuses a wrong token. Ray would write a line a second for a minute, and end without naming it."""
    where = [] if address == "auto" else ["--address", address]
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", *where]
    with suppress(subprocess.TimeoutExpired):  # then connecting fails, too
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS)
        if "AuthenticationError" in done.stderr:
            raise ConfigError(
                f"Ray cluster at '{address}'", "the token that it was started with", "another token, or none",
                "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as on its nodes.",
            )  # fmt: skip
