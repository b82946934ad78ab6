"""Figures: data in, picture out. Nothing here measures or predicts."""
