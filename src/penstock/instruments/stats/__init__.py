"""Statistics of repeated measurements."""
