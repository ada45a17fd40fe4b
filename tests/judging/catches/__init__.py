"""Silent bugs of distributed programs: each as its author wrote it, and as it should be."""
