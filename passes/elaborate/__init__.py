"""Execution of a schedule's statements: from the syntax tree to a plan of rows."""
