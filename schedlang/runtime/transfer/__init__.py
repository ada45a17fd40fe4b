"""Transfers of a program's state, or of other tensors, from one layout to another."""
