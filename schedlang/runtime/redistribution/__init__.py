"""Redistribution of tensors between two layouts: shardings, routes, and their execution."""
