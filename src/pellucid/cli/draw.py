"""Where a drawing goes: what cannot be written, or cannot be drawn, is refused before any work."""

from __future__ import annotations

from pathlib import Path

from pellucid.cli import output
from pellucid.evidence.report.charts import require

SUFFIXES = (".png", ".svg", ".pdf")


def destination(path: Path, overwrite: bool = False) -> output.Destination:
    """Refuses, before any work, a file that cannot be written or an image that cannot be drawn."""
    require()
    import matplotlib

    matplotlib.use("Agg")
    return output.destination(path, "--plot", SUFFIXES, overwrite=overwrite)
