"""Model files for schedules in the documentation, where no example has a suitable model."""
