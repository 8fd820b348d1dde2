"""Where runs are read from."""
