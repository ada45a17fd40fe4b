"""Programs on ranks against the untouched original: runs, observations, comparisons."""
