"""Layouts of a model's operators over mesh axes: a graph, its placements, a solver, and rows."""
