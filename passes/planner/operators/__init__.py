"""Layouts of a model's operators over an axis: a graph, its placements, a solver, and rows."""
