"""What the codes of messages are about, by family; `schedlang.codes` has them all."""
