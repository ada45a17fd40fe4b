"""Silent bugs of distributed programs in the open, each as its author wrote it and as it should be."""
