"""Studies on small models whose numbers the reproduction shows."""
