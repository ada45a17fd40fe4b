"""Sharded modules: forwards on shards of parameters, and redistribution at their edges."""
