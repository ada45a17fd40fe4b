"""Locks: what a schedule makes of a model, as text that a reviewer compares."""
