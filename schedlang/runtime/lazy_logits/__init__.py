"""Logits that wait for their loss, or stay split over the vocabulary: stand-ins for them."""
