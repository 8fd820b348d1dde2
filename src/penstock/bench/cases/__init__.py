"""The cases of each benchmark, from its knobs; what makes no sense is refused before a launch."""
