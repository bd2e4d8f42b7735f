"""All that a model of scenes carries beside its denoiser, measured: each part's figures, and a sheet to look at.

A part whose figures are there already, asked for alike, is not measured again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import read_json
from pellucid.evidence.adherence import adapters, tiles
from pellucid.evidence.adherence.adapters import Compared, Exam
from pellucid.evidence.adherence.making import Making
from pellucid.evidence.adherence.matching import AMONG, Matching, matching
from pellucid.evidence.adherence.opening import DTYPE
from pellucid.evidence.adherence.round_trip import RoundTrip, pairs, round_trip
from pellucid.evidence.adherence.shares import Share, percent
from pellucid.evidence.adherence.sheets import Card, contact_sheet
from pellucid.evidence.metrics.image_text import Judge
from pellucid.evidence.study.significance import Estimate
from pellucid.evidence.study.table import Table
from pellucid.interop import source
from pellucid.interop.atomic_files import put
from pellucid.pipeline.image_inputs import adapter_eyes, adapter_file
from pellucid.pipeline.load import load
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.request import Request

BESIDE = ("controlnet", "ip_adapter", "lora", "image_text")  # what may lie beside a base, by its folder in a bundle
Say = Callable[[str], object]
Found = RoundTrip | Compared | Matching


@dataclass(frozen=True)
class Suite:
    """`model` is the base; the other parts are folders or files, as `pellucid train` writes them, and may be left out.
    `count` images are made of each, `true` renders go through the VAE and to the image-text encoder."""

    model: str
    controlnet: str | None = None
    ip_adapter: str | None = None
    lora: str | None = None
    style: str = "sketch"  # of the LoRA
    image_text: str | None = None
    count: int = 200
    true: int = 1024
    making: Making = field(default_factory=Making)
    dtype: str = DTYPE
    device: str | None = None

    def __post_init__(self) -> None:
        if self.true < AMONG or self.true % AMONG:
            raise PellucidError(rule("true", f"a multiple of {AMONG}", self.true), "suite")
        self.exam("cpu")

    @staticmethod
    def of(model: str, **changes: Any) -> Suite:
        """The suite of a bundle, with the parts that it has."""
        place = source.locate(model)
        return Suite(model, **{name: f"{model}/{name}" for name in BESIDE if (place / name).is_dir()} | changes)

    @property
    def parts(self) -> list[str]:
        return ["vae", *(name for name in BESIDE if getattr(self, name))]

    def exam(self, device: str) -> Exam:
        return Exam(self.count, making=self.making, device=device)

    @cached_property
    def pipe(self) -> Pipeline:
        eyes = adapter_eyes(self.ip_adapter) if self.ip_adapter else None
        return load(self.model, dtype=self.dtype, device=self.device, image_encoder=eyes)


def measure(
    suite: Suite, folder: Path, say: Say = print, only: Sequence[str] | None = None
) -> dict[str, dict[str, Any]]:
    """Writes PART.json and PART.png for each part, and suite.md for all of them; returns the figures. `only` names the
    parts that are measured now."""
    wanted = suite.parts if only is None else list(only)
    for name in wanted:
        if name not in suite.parts:
            raise PellucidError(rule("only", f"parts that are given: {', '.join(suite.parts)}", name), "suite")
    folder.mkdir(parents=True, exist_ok=True)
    asked = json.loads(json.dumps(asdict(suite)))
    found: dict[str, dict[str, Any]] = {}
    for part in wanted:
        path = folder / f"{part}.json"
        kept = read(path, asked)
        if kept is None:
            say(f"measuring {part}")
            kept, cards = PARTS[part](suite)
            if cards:
                columns = 10 if part in ("vae", "lora") else 9  # pairs, or a hint and two images
                tiles.save(contact_sheet(cards, f"{Path(suite.model).name}: {part}", columns), folder / f"{part}.png")
            put(path, json.dumps({"asked": asked, "figures": kept}, indent=1, allow_nan=False) + "\n")
        found[part] = kept
    put(folder / "suite.md", table(found).markdown())
    return found


def read(path: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The figures of a part that was measured with the same settings."""
    try:
        held = read_json(path)
    except PellucidError:
        return None
    figures = held.get("figures")
    return figures if isinstance(figures, dict) and held.get("asked") == asked else None


Measured = tuple[dict[str, Any], tuple[Card, ...]]


def measure_vae(suite: Suite) -> Measured:
    pipe = suite.pipe
    vae, device, size = pipe.components.vae, str(pipe.device), pipe.size_of(Request())[0]
    making = suite.making
    found = round_trip(vae, suite.true, size=size, batch=making.batch, seed=making.seed, device=device)
    names = ("true", "after the VAE")
    cards = tuple(Card(one, "", names[i % 2], None) for i, one in enumerate(pairs(vae, 30, size=size, device=device)))
    return found.plain(), cards


def measure_controlnet(suite: Suite) -> Measured:
    found = adapters.follows_edges(suite.pipe, suite.controlnet, suite.exam(str(suite.pipe.device)))
    return found.plain(), found.cards


def measure_ip_adapter(suite: Suite) -> Measured:
    assert suite.ip_adapter is not None
    like = next(suite.pipe.components.network.parameters())
    adapter = adapters.read_adapter(adapter_file(suite.ip_adapter), like)
    found = adapters.carries_reference(suite.pipe, adapter, suite.exam(str(suite.pipe.device)))
    return found.plain(), found.cards


def measure_lora(suite: Suite) -> Measured:
    loaded = suite.pipe.load_lora(suite.lora)
    found = adapters.has_style(suite.pipe, loaded, suite.style, suite.exam(str(suite.pipe.device)))
    return found.plain(), found.cards


def measure_image_text(suite: Suite) -> Measured:
    assert suite.image_text is not None
    judge = Judge.load(suite.image_text, suite.pipe.device)
    return matching(judge, suite.true, seed=suite.making.seed, device=suite.pipe.device).plain(), ()


PARTS: dict[str, Callable[[Suite], Measured]] = {
    "vae": measure_vae,
    "controlnet": measure_controlnet,
    "ip_adapter": measure_ip_adapter,
    "lora": measure_lora,
    "image_text": measure_image_text,
}


def table(found: dict[str, dict[str, Any]]) -> Table:
    """Every figure, and what it is without the part."""
    rows: list[tuple[str, ...]] = []
    for part, one in found.items():
        if part == "vae":
            low, high = one["interval"]
            rows.append(("VAE", "PSNR of the round trip, dB", f"{one['psnr']:.2f} ({low:.2f} to {high:.2f})", "–"))
            rows.append(("VAE", "PSNR of the worst hundredth, dB", f"{one['worst']:.2f}", "–"))
            rows.append(("VAE", "read right in all attributes", share(one["after"]), share(one["before"])))
        elif part == "image_text":
            rows.append(("image-text", "cosine", f"{one['right']:.3f}", f"{one['shuffled']:.3f}, another's caption"))
            for key, words in (("by_picture", "caption found among 32"), ("by_text", "picture found among 32")):
                rows.append(("image-text", words, share(one[key]), f"{100 / AMONG:.1f} % by chance"))
        else:
            both = [Estimate(**one[key]) for key in ("adapted", "base")]
            rows.append((one["adapter"], one["figure"], *(number(estimate, part) for estimate in both)))
    note = "In brackets 95 % intervals. Without: the base from the same noise; for the VAE, the true images."
    return Table("Parts of the model", ("part", "figure", "with", "without"), tuple(rows), note)


def share(one: dict[str, Any]) -> str:
    return Share(one["right"], one["count"]).words


def number(estimate: Estimate, part: str) -> str:
    if part != "controlnet":
        return percent(estimate.value, estimate.low, estimate.high)  # type: ignore[arg-type]  # it has an interval
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
