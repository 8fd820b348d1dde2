"""The folder of a run, on a disk or in a bucket: its journal, logs, checksums and end."""
