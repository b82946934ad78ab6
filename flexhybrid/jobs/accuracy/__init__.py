"""``flexhybrid accuracy``: what policies cost in accuracy on a text."""
