"""The command line: ``stronghold``, or ``python -m stronghold``."""

import sys


def main() -> int:
    """Runs the command line, and returns its exit code; without the lab's packages, it says which is missing."""
    try:
        from stronghold.lab.cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "stronghold":
            raise  # not a package that is missing, but a part of this one
        from stronghold.lab.command import ERROR, WRONG_USAGE, missing

        print(f"{ERROR}{missing(error)}", file=sys.stderr)
        return WRONG_USAGE
    return run()


if __name__ == "__main__":
    sys.exit(main())
