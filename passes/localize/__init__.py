"""After a proof has failed: where, by which arithmetic, and whose row."""
