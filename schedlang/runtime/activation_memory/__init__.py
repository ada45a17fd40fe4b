"""Activations between forward and backward: recomputed, quantised, evicted under a budget."""
