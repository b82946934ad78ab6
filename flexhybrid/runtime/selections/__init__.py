"""Selections of cached tokens: H2O's heavy hitters, InfiniGen's speculation."""
