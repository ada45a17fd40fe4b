"""One file per verb of the command line; a verb is a function with typer's annotations."""
