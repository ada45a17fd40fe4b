"""Gradients made whole, in full or in fewer bytes; what parts of a batch weigh and share."""
