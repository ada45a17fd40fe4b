"""Smaller models under the same schedule, that show what the whole one would."""
