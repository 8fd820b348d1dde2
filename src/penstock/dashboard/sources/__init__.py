"""Runs as the dashboard lists them, from ledgers, run folders, logs and trackers."""
