"""Optimizers on shards of parameters: full-tensor updates, and the scale of a loss."""
