"""``python -m lightning_sym.cli``."""

import sys

from lightning_sym.cli.main import main

sys.exit(main())
