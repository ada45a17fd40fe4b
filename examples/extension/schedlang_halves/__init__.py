"""Primitives of one's own for schedlang."""
