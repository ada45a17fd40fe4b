"""Reduction of gradients over ranks, plain or compressed; statistics of the full batch."""
