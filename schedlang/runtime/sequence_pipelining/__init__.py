"""Sequences cut into slices that run one after the other."""
