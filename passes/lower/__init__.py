"""Lowering of a plan to a program that runs and trains on ranks."""
