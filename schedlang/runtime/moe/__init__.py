"""Experts on several ranks."""
