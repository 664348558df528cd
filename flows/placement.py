"""Former name of `flows.sharding`; kept for one version."""

from flows.sharding import sharding

placement = sharding.with_options(name="placement")

if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(placement)
