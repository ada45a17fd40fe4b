"""Lowering of a plan to a program that runs on ranks, and trains."""
