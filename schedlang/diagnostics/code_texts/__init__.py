"""Texts of the codes of messages, by family; `schedlang.diagnostics.codes` joins them."""
