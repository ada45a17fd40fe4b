"""Local ranks: a pool of processes, started once."""
