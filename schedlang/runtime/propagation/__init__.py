"""Forwards of sharded models on the meta device: which tensors differ by rank."""
