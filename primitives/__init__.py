"""One file per primitive; nothing else."""
