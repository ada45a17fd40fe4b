"""Statements of a schedule, read and executed: from syntax to the plan's actions."""
