"""``flexhybrid serve``: OpenAI's HTTP API over a running batch."""
