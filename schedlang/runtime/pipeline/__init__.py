"""Pipeline stages: models split by replay, and the executor of one rank's operations."""
