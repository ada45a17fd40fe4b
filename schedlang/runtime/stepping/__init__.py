"""Optimizers on parts: whole matrices, states by name."""
