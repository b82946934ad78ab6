"""Whole jobs built from the packages below: run, sweep, compare, accuracy, profile, simulate, doctor, skew."""
