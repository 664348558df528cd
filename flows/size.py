"""Former name of `flows.estimate`; kept for one version."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("size")

from flows.estimate import estimate
from flows.runtime.flow import flow

size = flow("size")(estimate.fn)
