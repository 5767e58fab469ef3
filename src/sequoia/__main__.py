"""`python -m sequoia`."""

import sys

from sequoia.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
