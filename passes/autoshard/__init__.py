"""Schedules proposed for a model and a mesh, and settings of a schedule priced side by side."""
