"""The original and programs on ranks: runs, observations, comparisons."""
