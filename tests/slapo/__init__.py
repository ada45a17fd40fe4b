"""Slapo's own tests for schedlang, and its silent errors: each is refused or right here."""
