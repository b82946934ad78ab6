"""Simulates a cascade on a cluster in virtual time."""
