"""Checkpoints: parts of tensors and of what optimizers know, under any layout."""
