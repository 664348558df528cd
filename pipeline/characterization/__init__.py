"""How fast a model of some shape trains on a machine, why, and what another would need."""
