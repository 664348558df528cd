"""The efficiency study: how fast models of different shapes train on a machine, why, and what another needs."""
