"""Whole jobs built from the floors below: profile, exactness, speed, compare."""
