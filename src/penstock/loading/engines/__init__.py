"""Engines that read chunks into buffers."""
