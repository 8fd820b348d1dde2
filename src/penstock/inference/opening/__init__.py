"""Open what a job names: the input, the model and its heads, the outputs."""
