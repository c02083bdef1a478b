"""`ling`, and `python -m ling_local`: the way in, which Ctrl-C may end before the program is even imported."""

import sys

from ling_local.errors import EXIT_INTERRUPTED


def main() -> int:
    """Run the command line; the exit code."""
    try:
        from ling_local.cli.main import run

        return run()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
