"""One kernel per file, with its torch reference beside it."""
