"""The support matrix: every pair of ways to split or save, and some triples, proven on threads."""
