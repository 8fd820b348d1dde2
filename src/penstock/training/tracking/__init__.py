"""Experiment trackers that follow a run: Comet, MLflow, TensorBoard, W&B."""
