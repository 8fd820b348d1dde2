"""Figures, drawn from what was recorded and from nothing else."""
