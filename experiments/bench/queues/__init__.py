"""Bench rows of files and queues of requests: runs, their census and memory, and batches that are refilled."""
