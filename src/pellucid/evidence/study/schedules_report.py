"""The report of a schedule study: charts, tables, and whether differences are more than chance, in one HTML file."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path

from pellucid.evidence.study import charts, schedules_charts
from pellucid.evidence.study.schedules_results import Results
from pellucid.evidence.study.schedules_table import plain, tables, verdicts
from pellucid.interop.atomic_files import put
from pellucid.train.config import to_plain

CHARTS = (
    ("quality", schedules_charts.quality, "Quality over training."),
    ("levels", schedules_charts.levels, "Where the network errs at the end, and where each schedule trained it."),
    ("stability", schedules_charts.stability, "How calm training was: the steps of a window against each other."),
    ("pictures", schedules_charts.images, "Pictures of the first seed, from the same noise."),
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2530; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #e3e8ee; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; } figure { margin: 1rem 0; }
.note, figcaption { color: #51606f; font-size: .88rem; }
pre { background: #f5f7f9; padding: 1rem; overflow-x: auto; font-size: .8rem; }
"""
ALONE = (
    "Each interval holds for its own pair at 95 %: of twenty pairs that do not differ, one would seem to. "
    "Less is better for both. Schedules of one seed share the data order, the first weights and the noise of images."
)
TABLE = "table.json"


def write(folder: Path) -> Path:
    """Reads a study's folder, finished or not, and writes charts/*.png, table.md, table.json and report.html there."""
    charts.require()
    found = Results.read(folder)
    (folder / "charts").mkdir(exist_ok=True)
    drawn = {name: draw(found, folder / "charts" / f"{name}.png") for name, draw, _ in CHARTS}
    put(folder / TABLE, json.dumps(plain(found), indent=1, allow_nan=False) + "\n")
    put(folder / "table.md", markdown(found))
    put(folder / "report.html", page(found, drawn))
    return folder / "report.html"


def headline(found: Results) -> str:
    """What was compared, and how far it is."""
    s = found.study
    scored, wanted = found.done
    seeds = "1 seed" if len(s.seeds) == 1 else f"{len(s.seeds)} seeds"
    words = f"{', '.join(s.schedules)} · {seeds} · {s.points[-1]:,} steps"
    return words if scored >= wanted else f"{words} · unfinished: {scored} of {wanted} scores"


def sentences(found: Results) -> list[str]:
    return [str(verdict["words"]) for verdict in verdicts(found)]


def markdown(found: Results) -> str:
    parts = ["# Noise schedules\n", headline(found) + "\n", *(table.markdown() for table in tables(found))]
    if said := sentences(found):
        parts += ["## Are they different?\n", "\n".join(f"- {words}" for words in said) + "\n", ALONE + "\n"]
    return "\n".join(parts)


def page(found: Results, drawn: dict[str, Path]) -> str:
    """Everything in one file: no script, nothing from elsewhere."""
    said = "".join(f"<li>{html.escape(words)}</li>\n" for words in sentences(found))
    verdict = f"<h2>Are they different?</h2>\n<ul>\n{said}</ul>\n<p class=note>{ALONE}</p>" if said else ""
    first, *rest = [table.html() for table in tables(found)] or [""]
    figures = [figure(drawn[name], caption) for name, _, caption in CHARTS]
    config = html.escape(json.dumps(to_plain(found.study), indent=1))
    body = "\n".join([first, verdict, *figures, *rest])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Noise schedules</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>Noise schedules</h1>\n<p class=note>{html.escape(headline(found))}</p>\n{body}\n"
        f"<h2>Config</h2>\n<details><summary>All of it</summary><pre>{config}</pre></details>\n</body>\n</html>\n"
    )


def figure(path: Path, caption: str) -> str:
    inside = base64.b64encode(path.read_bytes()).decode()
    words = html.escape(caption)
    image = f'<img alt="{words}" src="data:image/png;base64,{inside}">'
    return f"<figure>{image}<figcaption>{words}</figcaption></figure>"
