"""CAPTURE and HybridServe (KAIST)."""
