"""What a plan costs: bytes, collectives and time, counted without a step."""
