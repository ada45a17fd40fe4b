"""Collectives and the groups of ranks that join in them."""
