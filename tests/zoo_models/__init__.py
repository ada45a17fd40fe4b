"""Every model of transformers that can be made tiny, under four schedules each, proven or not."""
