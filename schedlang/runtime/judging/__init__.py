"""What the modules of a rank's program give, each one alone and in a whole run."""
