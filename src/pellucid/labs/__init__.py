"""The labs: questions about diffusion that are answered by running it, each with a page, a starter and a check.

`catalog` lists them, `script` reads a page, `process` runs one, `answers` checks an answer. Pages, starters and
checks are in folders of their own.
"""

from __future__ import annotations

import os

SMOKE = "PELLUCID_LAB_SMOKE"


def few(full: int, smoke: int) -> int:
    """How many steps, images or rounds a page uses: `full`, or `smoke` where PELLUCID_LAB_SMOKE is set."""
    return smoke if os.environ.get(SMOKE) else full
