"""A case over commits: series, steps, sentences, figure."""
