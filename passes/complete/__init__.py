"""Completion of `shard` rows: data flows between projections, and rows tried on the model."""
