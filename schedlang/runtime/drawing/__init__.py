"""Random numbers that depend on what is computed, not on where."""
