"""Runs the command ``anaphora`` for ``python -m anaphora``."""

import sys

from anaphora.cli import main

sys.exit(main())
