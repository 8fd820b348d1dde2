"""Figures, drawn from records only."""
