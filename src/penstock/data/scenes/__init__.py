"""Scenes of radar and the xView3 challenge: reading, chipping, labels, objects and scores."""
