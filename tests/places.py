"""Folders that tests read."""

from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"
ROOT = DATA.parents[1]
SHARED = ROOT.parent / "shared" / "data"
"""Real inputs beside the checkout; tests that need them skip where they are not."""
