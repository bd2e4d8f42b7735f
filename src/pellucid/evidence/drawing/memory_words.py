"""Words of memory that its tables and its images share: what was run, and the peak of a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.core.wording import short
from pellucid.pipeline.memory import in_words

if TYPE_CHECKING:
    from pellucid.pipeline.compare import Row
    from pellucid.pipeline.pipeline import Pipeline
    from pellucid.pipeline.policy import Policy
    from pellucid.pipeline.request import Request

ITSELF = "the stage itself"  # what happens in no module: noise, sums, images


def described(pipe: Pipeline, request: Request, policy: Policy, device: Any) -> dict[str, Any]:
    """What was run, for the head of every output."""
    width, height = pipe.size_of(request)
    kind = next(pipe.components.network.parameters()).dtype
    return {
        "model": pipe.components.name,
        "size": [width, height],
        "batch": request.n,
        "steps": request.steps,
        "device": str(device),
        "dtype": str(kind).removeprefix("torch."),
        "policy": policy.to_dict(),
        "controlnets": len(request.controls),
        "loras": len(request.loras),
    }


def headline(about: dict[str, Any]) -> str:
    width, height = about["size"]
    words = [Path(about["model"]).name or about["model"], f"{width}×{height}", f"batch {about['batch']}"]
    words += [about["dtype"], f"on {about['device']}"]
    words += [f"{name}={value}" for name, value in about["policy"].items()]
    words += [
        f"{about[what]} {name}" for what, name in (("controlnets", "ControlNet"), ("loras", "LoRA")) if about[what]
    ]
    return " · ".join(words)


def peak_of(row: Row) -> int:
    return max((row.measured or row.predicted or {"": 0}).values())


def cells(row: Row) -> tuple[str, ...]:
    """A strategy in words: peaks, milliseconds, ratio, and how far its image moved from which other."""

    def at(sizes: Any, stage: str | None = None) -> str:
        if not sizes:
            return "–"
        return in_words(max(sizes.values()) if stage is None else sizes.get(stage, 0))

    first = row.strategy.against == row.strategy.name
    return (
        at(row.predicted),
        at(row.measured),
        at(row.measured, "denoise"),
        at(row.measured, "decode"),
        "–" if row.seconds is None else f"{row.seconds * 1000:.0f}",
        "–" if row.times is None else f"{row.times:.2f}",
        "" if first else "–" if row.largest is None else short(row.largest, 3),
        "" if first else "–" if row.mean is None else short(row.mean, 3),
        "" if first else row.strategy.against,
    )


def row_notes(about: dict[str, Any], rows: Sequence[Row], left_out: Sequence[str]) -> list[str]:
    """How to read a table of strategies, and what is not in it."""
    return [
        f"predicted, measured: the peak of a whole run of {about['steps']} steps; denoise, decode: measured there.",
        "ms: the fastest of three runs; × time: to runs of the first row just before and after.",
        "diff: of the images' pixels in 255ths, to the row named last; for an adapter it is what the adapter does.",
        *(f"{row.strategy.name}: {row.trouble}" for row in rows if row.trouble),
        *(f"left out: {words}." for words in left_out),
    ]
