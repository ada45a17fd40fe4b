"""Optimizers on parts: matrices that are looked at whole, and the scale of a loss."""
