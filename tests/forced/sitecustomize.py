"""Loaded by every Python that a test starts: see ``forced_machine``."""

from forced_machine import install

install()
