"""Proofs of a plan that need no rank: gradients, roles, owners, weights."""
