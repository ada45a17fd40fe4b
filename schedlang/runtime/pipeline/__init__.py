"""Stages of a pipeline: models cut by replay, and one rank's rows of a timeline."""
