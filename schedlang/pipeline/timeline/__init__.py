"""The timeline of a pipeline: one table of operations that is proven, timed, drawn and executed."""
