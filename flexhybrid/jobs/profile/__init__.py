"""``flexhybrid profile``: samples of this machine as a hardware file."""
