"""Attention over a sequence that is split over ranks: every method, as functions of tensors."""
