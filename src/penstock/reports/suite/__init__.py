"""Reports of suites of trainings."""
