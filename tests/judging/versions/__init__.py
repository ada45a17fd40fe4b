"""Silent bugs in the code of the versions that had them, judged where one is installed."""
