"""How patches, blocks, units and parts cut a volume, and how patches are joined again."""
