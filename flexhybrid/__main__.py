"""The ``flexhybrid`` command, and ``python -m flexhybrid``."""

import sys


def main() -> int:
    """Run this process's command line; return the exit status (``cli.main``)."""
    try:
        from flexhybrid.cli import main as run  # takes half a second, during which Ctrl-C may come
    except KeyboardInterrupt:
        print("flexhybrid: stopped", file=sys.stderr)
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
