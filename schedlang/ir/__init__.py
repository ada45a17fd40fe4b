"""Immutable values that passes read and write: meshes, placements, models, primitives, plans."""
