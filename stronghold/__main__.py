"""``python -m stronghold``."""

import sys

from stronghold.cli import main

if __name__ == "__main__":
    sys.exit(main())
