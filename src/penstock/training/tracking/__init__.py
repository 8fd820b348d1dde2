"""Experiment trackers that follow a run: Comet, MLflow and TensorBoard."""
