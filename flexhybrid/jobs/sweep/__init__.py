"""``flexhybrid sweep``: a grid of settings, evaluated into one table."""
