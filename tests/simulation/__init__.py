"""Runs the real state machines on a simulated clock and network, driven by one seed, and looks for broken promises."""
