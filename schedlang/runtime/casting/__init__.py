"""Modules that compute in another dtype than they are stored in."""
