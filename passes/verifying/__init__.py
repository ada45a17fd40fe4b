"""A whole proof: programs on ranks, the original beside them, and blame where they differ."""
