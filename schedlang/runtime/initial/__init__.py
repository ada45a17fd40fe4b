"""Initial values of a model that no process holds in full: replayed one tensor at a time, or
read."""
