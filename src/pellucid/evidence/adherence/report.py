"""What a study of adherence writes: figures as JSON and Markdown, a sheet of random images, a sheet of failures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pellucid.evidence.adherence import tiles
from pellucid.evidence.adherence.figures import Figures, figures, table
from pellucid.evidence.adherence.prompted import Adherence, Shown, Study
from pellucid.evidence.adherence.sheets import Card, contact_sheet
from pellucid.interop.atomic_files import put
from pellucid.models.guidance import Guidance
from pellucid.train.trainer import MODEL

ON_A_SHEET = 100


def write(study: Study) -> dict[str, Figures]:
    """figures.json, table.md, random.png and, where there are any, failures.png, of the images so far."""
    shown = study.shown()
    found = figures(shown, study.config.making.seed)
    put(study.folder / "figures.json", json.dumps(plain(study.config, found), indent=1, allow_nan=False) + "\n")
    put(study.folder / "table.md", table(found, headline(study.config)).markdown())
    generator = torch.Generator().manual_seed(study.config.making.seed)
    picks = torch.randperm(len(shown), generator=generator)[:ON_A_SHEET].sort().values.tolist()
    right = found["all"].right
    write_sheet(study, [shown[i] for i in picks], f"{headline(study.config)}: random images", "random.png")
    failures = [one for one in shown if not one.verdict.right]
    title = f"{headline(study.config)}: {right.count - right.right} of {right.count:,} images are not right"
    if failures:
        write_sheet(study, failures[:ON_A_SHEET], title, "failures.png")
    else:
        (study.folder / "failures.png").unlink(missing_ok=True)
    return found


def headline(config: Adherence) -> str:
    making = config.making
    place = Path(config.model)
    model = place.parent.name if place.name == MODEL and place.parent.name else place.name
    model += "/dit" if config.part == "dit" else ""
    guidance = Guidance.parse(making.guidance).text()
    return f"{model}, {making.sampler}, {making.steps} steps, guidance {guidance}"


def write_sheet(study: Study, shown: Sequence[Shown], title: str, name: str) -> None:
    cards = []
    for one, image in zip(shown, study.images(list(shown)), strict=True):
        verdict = one.verdict
        cards.append(Card(image, f"{one.number}: {one.caption}", verdict.words, verdict.right))
    tiles.save(contact_sheet(cards, title), study.folder / name)


def plain(config: Adherence, found: dict[str, Figures]) -> dict[str, Any]:
    making = {name: getattr(config.making, name) for name in ("sampler", "steps", "guidance", "seed")}
    return {
        "model": config.model,
        "part": config.part,
        "dtype": config.dtype,
        **making,
        "prompts": config.prompts,
        "objects": {key: one.plain() for key, one in found.items()},
    }
