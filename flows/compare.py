"""Former name of `flows.backtest`; kept for one version."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.cli import command

    command("compare")

from flows.backtest import backtest

compare = backtest.with_options(name="compare")
