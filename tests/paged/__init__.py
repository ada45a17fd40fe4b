"""Model files that schedules of the book are verified with, where no example has such a model."""
