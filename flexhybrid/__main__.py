"""``python -m flexhybrid`` is the ``flexhybrid`` command."""

import sys

from flexhybrid.cli import main

if __name__ == "__main__":
    sys.exit(main())
