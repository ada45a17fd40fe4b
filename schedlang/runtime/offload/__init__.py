"""Parameters, gradients, optimizer state, activations in host memory, on disk or on a peer."""
