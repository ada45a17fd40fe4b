"""Many settings of a schedule, or meshes of a model, priced side by side."""
