"""Silent bugs in released library versions, judged where such a version is installed."""
