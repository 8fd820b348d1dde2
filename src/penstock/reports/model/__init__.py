"""Reports of benchmarks of models."""
