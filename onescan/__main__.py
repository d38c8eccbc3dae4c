"""python -m onescan."""

import sys

from onescan.cli import main

sys.exit(main())
