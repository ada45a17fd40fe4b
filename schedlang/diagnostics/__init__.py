"""What goes wrong, said: sources and spans, codes, refusals, and where they are shown."""
