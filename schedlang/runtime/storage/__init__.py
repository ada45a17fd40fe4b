"""Tensors on device, host, disk and in folders, and the copies between; saved activations."""
