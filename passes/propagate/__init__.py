"""Layouts of tensors through one forward, and what splits of rows and tokens make of it."""
