"""A comparison of two traces in words."""

from __future__ import annotations

from pellucid.core.wording import counted, short
from pellucid.evidence.trace.diff import Comparison

NAMES = {"x_next": "the next x", "cond": "the prediction with the prompt"}
TENSORS = ("x", "cond", "uncond", "x0", "x_next")


def headline(found: Comparison) -> str:
    """Whether two runs part, and if so where and by what."""
    if found.first is None:
        return f"the same in all of {counted(found.steps, 'step')}"
    others = len(found.images) - 1
    more = f" (and {counted(others, 'image')} more)" if others > 0 else ""
    if found.first.cause == "nan":
        return f"both are NaN from step {found.first.step}, image {found.first.image}{more}; the same before"
    return f"they diverge at step {found.first.step}, image {found.first.image}{more}, by {found.first.cause}"


def details(found: Comparison) -> list[str]:
    """What the cause did, by how much, and what the headers say of it; nothing where the runs are the same."""
    first = found.first
    if first is None:
        return []
    said = [first.detail]
    if first.distance is not None:
        least = "at least " if first.least else ""
        said.append(f"{NAMES.get(first.what, first.what)} differs by {least}{short(first.distance, 3)} of its norm")
    elif first.what in TENSORS and first.cause != "nan":
        said.append("by how much is not in these traces: record with tensors to know")
    said += [told.text() for told in found.why]
    if not found.why and first.cause in ("noise", "model", "guidance"):
        said.append(f"the headers say nothing that differs in {first.cause}")
    return said
