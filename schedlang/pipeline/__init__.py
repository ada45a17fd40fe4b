"""Pipelines without torch: schedules of operations, their timelines, and what operations cost."""
