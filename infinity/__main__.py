"""`python -m infinity`: the same command as `infinity`."""

import sys

from infinity.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
