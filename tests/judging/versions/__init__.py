"""Silent bugs in the code of the versions that had them, judged where such a version is installed."""
