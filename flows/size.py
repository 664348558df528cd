"""Former name of `flows.estimate`; kept for one version."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.cli import command

    command("size")

from flows.estimate import estimate

size = estimate.with_options(name="size")
