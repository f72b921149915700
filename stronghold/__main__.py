"""The command line: ``stronghold``, or ``python -m stronghold``."""

import sys


def main() -> int:
    """Runs the command line, and returns its exit code."""
    from stronghold.lab.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
