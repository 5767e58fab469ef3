"""Weights that do not fit into fast memory: read or copied there layer by layer, once for each pass."""
