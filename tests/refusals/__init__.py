"""Every code produced as its page shows it."""
