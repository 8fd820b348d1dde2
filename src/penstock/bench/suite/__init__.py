"""The suite: presets of batch sizes and workers, each a training in a fresh process."""
