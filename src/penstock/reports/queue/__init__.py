"""Reports of benchmarks of the prefetch queue."""
