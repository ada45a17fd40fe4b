"""Regions inside a module: what a pattern matches there, what runs instead, what inductor fuses."""
