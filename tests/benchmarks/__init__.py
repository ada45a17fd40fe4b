"""Benchmarks: each prints what it measured, ratios side by side in one run; none asserts."""
