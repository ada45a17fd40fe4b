"""What a built module calls while it runs."""
