"""``python -m anaphora`` is the command ``anaphora``."""

import sys

from anaphora.cli import main

sys.exit(main())
