"""What is kept for a backward, recomputed, offloaded or streamed."""
