"""Adapters: replaced functions and private parts of torch; nowhere else are there any."""
