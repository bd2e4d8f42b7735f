"""The card of a bundle: what it was trained on and how, how long that took, what was measured, and where it fails."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from pellucid.core import reader
from pellucid.core.errors import PellucidError, rule
from pellucid.interop import weights
from pellucid.train import journal, trainer

MAX_BYTES = 1 << 20  # of a template, a config, a file of figures
MAX_LOG_BYTES = 256 << 20
MAX_FIGURES = 400
FIELDS = ("sizes", "runs", "figures", "recipes")  # what a template may ask for, as $sizes, …


@dataclass(frozen=True)
class Card:
    """`template` is Markdown with $sizes, $runs, $figures and $recipes; `figures` are files of what was measured, JSON
    or Markdown, shown under their names; `hardware` is what it was trained on; from `earlier` runs others went on."""

    template: Path
    figures: tuple[Path, ...] = ()
    hardware: str = ""
    earlier: Mapping[str, Path] = field(default_factory=dict)

    def text(self, runs: Mapping[str, Path], sizes: Mapping[str, int]) -> str:
        """The card, as Markdown. It says nothing that changes from one making of it to the next."""
        runs = {**self.earlier, **runs}
        words = {
            "sizes": table(("part", "MB"), [(name, f"{size / 1e6:.2f}") for name, size in sizes.items()]),
            "runs": runs_table(runs, self.hardware),
            "figures": "\n\n".join(figures_of(path) for path in self.figures) or "None were given.",
            "recipes": "\n\n".join(recipe_of(name, run) for name, run in runs.items()),
        }
        template = Template(read_text(self.template))
        try:
            return template.substitute(words).rstrip() + "\n"
        except (KeyError, ValueError) as error:
            must = "with no other $ than " + ", ".join(f"${name}" for name in FIELDS)
            raise PellucidError(rule(f"template {self.template.name}", must, str(error)), "card-template") from None


def read_text(path: Path) -> str:
    return reader.read_text(path, path.name, MAX_BYTES, "card-file")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---", *["---:"] * (len(head) - 1)), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


# --- runs --------------------------------------------------------------------------------------------------------


def runs_table(runs: Mapping[str, Path], hardware: str) -> str:
    rows, total = [], 0.0
    for name, run in runs.items():
        config, last, seconds = config_of(run), *logged(run)
        total += seconds
        steps, batch = int(config["steps"]), int(config["batch"])
        counts = (f"{steps:,}", f"{batch:,}", f"{steps * batch / 1e6:.2f}", f"{seconds / 60:.1f}")
        rows.append((name, parameters_of(run / trainer.MODEL), *counts, f"{last:.4g}"))
    head = ("run", "parameters in its folder", "steps", "batch", "million images", "minutes", "last loss")
    on = f" on {hardware}" if hardware else ""
    return f"{table(head, rows)}\n\nTogether {total / 60:.1f} minutes of training{on}."


def config_of(run: Path) -> dict[str, Any]:
    try:
        held = reader.read_json(run / trainer.CONFIG, MAX_BYTES, foreign=True)["config"]
        int(held["steps"]), int(held["batch"])
    except (PellucidError, ValueError, KeyError, TypeError, OverflowError):
        raise PellucidError(rule(f"{trainer.CONFIG} of {run.name}", "that of a run", "another"), "card-file") from None
    return held


def logged(run: Path) -> tuple[float, float]:
    """The last loss of a run, and the seconds of its training: each window's images by its images per second."""
    path = run / journal.FILE
    what = f"{journal.FILE} of {run.name}"
    seconds, before, last = 0.0, 0.0, 0.0
    for text in reader.read_text(path, what, MAX_LOG_BYTES, "card-file").splitlines():
        held = reader.parse_object(text, what, "card-file", foreign=True)
        if "note" in held:
            continue
        line = {
            key: reader.typed(float, held.get(key), f"{key} in {what}", code="card")
            for key in ("images", "images_per_s", "loss")
        }
        seconds += (line["images"] - before) / max(line["images_per_s"], 1e-9)
        before, last = line["images"], line["loss"]
    return last, seconds


def parameters_of(model: Path) -> str:
    """How many numbers the files of a model hold."""
    count = 0
    for path in sorted(model.rglob("*.safetensors")):
        shapes = weights.shapes_of(path)
        count += sum(math.prod(shape) for shape in shapes)
    return f"{count / 1e6:.2f} M"


def recipe_of(name: str, run: Path) -> str:
    held = json.dumps(config_of(run), indent=1, sort_keys=True, ensure_ascii=False)
    return f"<details><summary>{name}</summary>\n\n```json\n{held}\n```\n\n</details>"


# --- figures -----------------------------------------------------------------------------------------------------


def figures_of(path: Path) -> str:
    """A Markdown file as it is; a JSON file as a table, where what is nested has its names joined."""
    title = f"### {path.stem.replace('_', ' ')}\n\n"
    if path.suffix == ".md":
        return title + read_text(path).strip()
    rows = [(name, shown(value)) for name, value in flat(weights.read_json(path, MAX_BYTES))]
    if not 0 < len(rows) <= MAX_FIGURES:
        raise PellucidError(rule(f"figures in {path.name}", f"1 to {MAX_FIGURES}", len(rows)), "card-figures")
    return title + table(("what", "value"), rows)


def flat(held: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in held.items():
        whole = f"{above} · {name}" if above else name
        if isinstance(value, dict):
            yield from flat(value, whole)
        else:
            yield whole, value


def shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(shown(one) for one in value[:8]) + (", …" if len(value) > 8 else "")
    return str(value)
