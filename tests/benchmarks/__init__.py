"""Benchmarks: each prints measured figures and ratios of one run; none asserts limits."""
