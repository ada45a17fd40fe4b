"""What torch has no door for: its functions replaced, its private parts used; nothing elsewhere."""
