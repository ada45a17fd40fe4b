"""Instruments for tests: nothing here knows a schedule."""
