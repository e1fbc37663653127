"""One rank of a session: ``python -m tests.harness FOLDER``."""

import sys

from tests.harness.inner import main

if __name__ == "__main__":
    sys.exit(main())
