"""What is asked for, opened: the input, the model and its heads, the outputs, the job."""
