"""Initial values of models that no process holds in full: replayed per tensor, or read."""
