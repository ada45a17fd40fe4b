"""Localisation of a failed proof: where, by which arithmetic, and whose row."""
