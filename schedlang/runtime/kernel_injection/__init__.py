"""Computations put in the place of others: kernels, compiled regions, modules of one's own."""
