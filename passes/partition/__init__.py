"""Pipeline stages of a plan: where the model is split, and which rank runs which stage when."""
