"""A model on devices: batches of patches in, computed bricks out."""
