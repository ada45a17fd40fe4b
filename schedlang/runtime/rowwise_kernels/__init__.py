"""A chain of pointwise operators and row reductions as one generated kernel each way."""
