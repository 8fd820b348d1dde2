"""Reports of benchmarks of loaders."""
