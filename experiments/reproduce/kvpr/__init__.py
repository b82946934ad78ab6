"""KVPR."""
