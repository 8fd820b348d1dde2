"""Objects of a volume: found in blocks, joined, numbered and measured over all of it."""
