"""A process of `dlrm serve`: puts the registered model behind the server's application."""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.processes.process import Importing, die_with_parent
from pipeline.serving.config import ServingConfig
from pipeline.serving.process import run_process

if TYPE_CHECKING:
    from pipeline.inference.served import ServedModel

SERVED = "pipeline.inference.served"
"""What every version needs. It takes seconds to import."""


def load(folder: Path, config: ServingConfig) -> "ServedModel":
    """Loads a version that was downloaded to a folder, and makes it ready to answer."""
    import torch  # the process answers while another thread imports this

    from pipeline.inference.files import EXAMPLE, PACKED
    from pipeline.inference.served import open_served

    torch.set_num_threads(config.threads)
    model = open_served(folder / PACKED, config.log_keep if config.log else {})
    model.warm(folder / EXAMPLE)
    return model


def main(words: list[str]) -> None:
    """Runs the process.

    Args:
        words: The config as JSON, the model's name, the parent's process id, and the descriptors of the listening
            socket and of the channel.
    """
    die_with_parent(int(words[2]))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s | %(levelname)-7s | %(message)s", datefmt="%H:%M:%S")
    config = ServingConfig.model_validate_json(words[0])
    with Importing(SERVED) as background:
        background.start()
        run_process(config, words[1], lambda folder: load(folder, config), int(words[3]), int(words[4]))


if __name__ == "__main__":
    main(sys.argv[1:])
