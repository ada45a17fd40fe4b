"""Diagnostics: sources and spans, codes, refusals, and where these are shown."""
