"""Gradients made whole, in full or in fewer bytes; parts of a batch and what they weigh."""
