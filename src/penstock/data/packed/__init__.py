"""The packed data set on disk: written, opened and audited."""
