"""Former name of `flows.estimate`; kept for one version."""

from flows.estimate import estimate

size = estimate.with_options(name="size")

if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(size)
