"""A cascade at work: a file of requests in this process, or Ray Serve."""
