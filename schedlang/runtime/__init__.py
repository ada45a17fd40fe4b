"""Execution: everything that a built module calls while it runs."""
