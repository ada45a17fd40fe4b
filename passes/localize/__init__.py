"""Localisation of a failed proof: the module, the arithmetic, and the rows to blame"""
