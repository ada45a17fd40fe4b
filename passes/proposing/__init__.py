"""Schedules written for a model and a mesh, and rows that complete others."""
