"""Reports of trainings."""
