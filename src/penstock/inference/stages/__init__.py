"""A running job, from beginning to summary: read, forward, stitch, write, each watched."""
