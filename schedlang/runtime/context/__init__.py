"""Unmodified models whose ranks have different tokens of the same sequences."""
