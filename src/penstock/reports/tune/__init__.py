"""Settings recommended from records."""
