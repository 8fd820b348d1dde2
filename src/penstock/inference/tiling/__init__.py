"""How patches, bricks, blocks and parts cut a volume, and how patches are joined again."""
