"""Training of the small checkpoints and the data they learn from."""
