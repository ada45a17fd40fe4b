"""The table of transformers models: each tiny model under four schedules, proven or not."""
