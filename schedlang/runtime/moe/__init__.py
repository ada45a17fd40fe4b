"""Experts that are sharded over ranks: routing of tokens, capacity, and probes of modules."""
