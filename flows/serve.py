"""Serves a model's champion over HTTP: `dlrm serve NAME port=5001 processes=2`. Ctrl-C stops it.

NAME is the model's name in the registry, or its config file. docs/serving.md shows the requests.
"""

import logging
import signal
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from flows.runtime.cli import describe_error, parse
from flows.runtime.environment import quiet_libraries
from flows.runtime.front import run_main
from flows.runtime.redaction import remember
from pipeline.config import load
from pipeline.config.files import home_path
from pipeline.config.validation_messages import explain
from pipeline.errors import ConfigError
from pipeline.serving.config import ServingConfig

Settings = ServingConfig
USAGE = "Usage: dlrm serve NAME [key=value ...]"
SUFFIXES = (".yaml", ".yml")


def main(words: Sequence[str]) -> int:
    """Serves until a signal arrives. Returns the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s | %(levelname)-7s | %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("dlrm").setLevel(logging.INFO)
    quiet_libraries()
    try:
        start([word for word in words if word != "--debug"])
    except KeyboardInterrupt:
        return 0
    except Exception as error:
        print(f"error: {describe_error(error, '--debug' in words)}", file=sys.stderr)
        return 1
    return 0


def start(words: Sequence[str]) -> None:
    """Reads the words and serves.

    Raises:
        ConfigError: If a word is wrong.
    """
    if not words or "=" in words[0]:
        raise ConfigError("command line", "the name of a model first", " ".join(words) or "nothing", USAGE)
    name, serving = words[0], read_options(words[1:])
    from pipeline.registration.config import RegistrationConfig

    registration, home = RegistrationConfig(), home_path(".dlrm")
    if name.endswith(SUFFIXES):
        config = load(name)
        remember(config)
        name, registration, home = config.model_name, config.registration, config.home_path
    from pipeline.jobs.serving.run import serve

    serve(name, serving, registration, home)


def read_options(words: Sequence[str]) -> ServingConfig:
    """Reads key=value words.

    Raises:
        ConfigError: If a key is unknown, or its value is of the wrong kind.
    """
    known = list(ServingConfig.model_fields)
    overrides, options = parse(words, known)
    if overrides:
        raise ConfigError(f"argument '{next(iter(overrides))}'", f"one of {', '.join(known)}", "another", USAGE)
    if isinstance(options.get("hosts"), str):
        options["hosts"] = options["hosts"].split(",")
    try:
        return ServingConfig.model_validate(options)
    except ValidationError as error:
        raise explain("dlrm serve", error, ServingConfig) from None


if __name__ == "__main__":
    run_main("serve", main)
