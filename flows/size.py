"""Former name of `flows.estimate`; kept for one version."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command
    from pipeline.study.points.load import load_study

    command("size", load_study)

from flows.estimate import estimate
from flows.runtime.flow import flow
from pipeline.study.points.load import load_study

size = flow("size", load_study)(estimate.fn)
