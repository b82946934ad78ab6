"""Small models of a cascade: digits' CNNs, which are trained here, and a table of n-grams."""
