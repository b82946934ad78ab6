"""Every Python that a test starts loads this module: see ``forced_machine``."""

from forced_machine import install

install()
