"""``flexhybrid compare``: policies side by side, predicted against measured."""
