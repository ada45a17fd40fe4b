"""Checkpoints: whole tensors, under any layout."""
