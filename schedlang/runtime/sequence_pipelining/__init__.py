"""Sequence pipelining: sequences are split into slices that run one after the other."""
