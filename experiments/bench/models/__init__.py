"""Bench rows of models by kind: layers of several kinds, and the paths by which models run."""
