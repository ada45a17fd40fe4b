"""Analyses of a plan with a batch, made before there are ranks: holdings, reductions, refusals."""
