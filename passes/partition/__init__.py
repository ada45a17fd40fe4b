"""Stages: where a model is cut, and who runs what."""
