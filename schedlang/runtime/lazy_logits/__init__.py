"""Stand-ins for logits: computed together with the loss, or sharded over the vocabulary."""
