"""HybridServe (Edinburgh), the cascade."""
