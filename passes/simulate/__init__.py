"""Costs of a plan: bytes, collectives and time, counted without a step."""
