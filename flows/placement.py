"""Former name of `flows.sharding`; kept for one version."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("placement")

from flows.runtime.flow import flow
from flows.sharding import sharding

placement = flow("placement")(sharding.fn)
