"""``python -m tests.harness FOLDER`` is one rank of a session."""

import sys

from tests.harness.inner import main

if __name__ == "__main__":
    sys.exit(main())
