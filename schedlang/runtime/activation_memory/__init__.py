"""What is kept for a backward: recomputed, quantised, evicted under a budget."""
