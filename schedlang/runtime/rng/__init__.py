"""Random draws: by logical masks, or natively from this rank's generators."""
