"""Layout propagation: forwards of sharded models on meta, and which tensors differ by rank."""
