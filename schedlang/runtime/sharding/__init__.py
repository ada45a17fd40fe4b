"""Modules whose parameters are parts: how they compute, and what crosses their edges."""
