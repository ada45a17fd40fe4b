"""Where tensors lie (device, host memory, disk, folders), and what moves between."""
