"""Charts: figures as data, which a page draws in a browser and a file of a paper on paper."""
