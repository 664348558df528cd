"""Former name of `flows.backtest`; kept for one version."""

from flows.backtest import backtest

compare = backtest.with_options(name="compare")

if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(compare)
