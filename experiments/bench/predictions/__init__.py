"""Bench rows of predictions: against papers, against what systems promise, and how long a search takes."""
