"""What the codes of messages are about, by family; `schedlang.diagnostics.codes` has them all."""
