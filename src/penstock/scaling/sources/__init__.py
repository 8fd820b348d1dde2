"""Sources of runs: logs, folders, ledgers and trackers."""
