"""A cascade on a cluster in virtual time."""
