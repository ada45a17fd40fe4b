"""Checkpoints: sharded tensors and optimizer state, saved and loaded under any layout."""
