"""Reduction of a model: a smaller one under the same schedule that can show the same mistakes."""
