"""Schedules written for a model and a mesh."""
