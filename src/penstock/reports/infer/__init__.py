"""Reports of runs of inference."""
