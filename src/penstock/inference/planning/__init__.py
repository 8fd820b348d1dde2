"""What is computed before any data is read: cuts, memory, the plan, and jobs on many workers."""
