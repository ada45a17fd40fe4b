"""Transfers of a program's state, or of anybody's tensors, from one layout into another."""
