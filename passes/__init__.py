"""One file per pass over a whole plan."""
