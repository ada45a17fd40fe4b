"""Regions inside a module: its data flow, what a pattern matches there, and what runs instead."""
