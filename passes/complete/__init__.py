"""Rows that complete what a plan began: flows through the model, and rows tried on it."""
