"""Lets the parity tests import their harness by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
