"""Attention over a sequence that is split over ranks: `attention` is the way in."""
