"""Layouts of tensors in one forward on the meta device; splits of batches and of sequences."""
