"""Values of a model that no process holds whole: made one tensor at a time, or read from files."""
