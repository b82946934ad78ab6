"""InfiniGen."""
