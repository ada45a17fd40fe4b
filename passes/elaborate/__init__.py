"""Statements of a schedule executed: from syntax to a plan of rows."""
