"""Where the package publishes its functions."""
