"""Figures: data in, picture out. Nothing here measures or predicts."""

FORMATS = ("png", "pdf", "svg")  #: in which every figure is written
