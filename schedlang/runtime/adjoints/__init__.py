"""Which tensors differ between ranks, through a forward and its backward on the meta device."""
