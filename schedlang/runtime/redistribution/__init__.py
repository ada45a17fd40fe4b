"""Transfers between two layouts: where boxes lie, who sends which to whom, and the sending."""
