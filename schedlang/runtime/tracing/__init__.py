"""One forward recorded: its units and calls, and which values flow between them."""
