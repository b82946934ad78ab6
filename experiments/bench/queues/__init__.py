"""Bench rows of request queues: jobs, refilled batches, shared prefixes and forecasts."""
