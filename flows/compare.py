"""Former name of `flows.backtest`; kept for one version."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("compare")

from flows.backtest import backtest
from flows.runtime.flow import flow

compare = flow("compare")(backtest.fn)
