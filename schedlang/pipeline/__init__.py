"""Pipelines without torch: schedules of operations, their timelines, and costs of operations"""
