"""Forwards on the meta device: recorded, followed, typed and judged without values."""
