"""The figures of a study of adherence: shares by number of objects and by attribute, and what chance would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pellucid.evidence.adherence.prompted import Shown
from pellucid.evidence.adherence.shares import Share
from pellucid.evidence.adherence.verdict import ATTRIBUTES, Verdict
from pellucid.evidence.study.table import Table


@dataclass(frozen=True)
class Figures:
    """Of some images. `attributes`: the share of images that have all of it right, of those that were asked for it;
    `bled` of those with several shapes; `shuffled`: right by the caption of another image with as many objects."""

    right: Share
    attributes: dict[str, Share]
    unreadable: Share
    bled: Share
    shuffled: Share

    @staticmethod
    def of(verdicts: Sequence[Verdict], shuffled: Sequence[Verdict]) -> Figures:
        by = {name: Share.of(verdict.marks.get(name) for verdict in verdicts) for name in ATTRIBUTES}
        return Figures(
            right=Share.of(verdict.right for verdict in verdicts),
            attributes={name: share for name, share in by.items() if share.count},
            unreadable=Share.of(not verdict.readable for verdict in verdicts),
            bled=Share.of(verdict.bled for verdict in verdicts),
            shuffled=Share.of(verdict.right for verdict in shuffled),
        )

    def plain(self) -> dict[str, Any]:
        own = {name: getattr(self, name).plain() for name in ("right", "unreadable", "bled", "shuffled")}
        return {**own, "attributes": {name: share.plain() for name, share in self.attributes.items()}}


def figures(shown: Sequence[Shown], seed: int = 0) -> dict[str, Figures]:
    """By number of objects, and of all."""
    verdicts = {one.number: one.verdict for one in shown}
    chance = shuffled(shown, seed)

    groups = {"all": [one.number for one in shown]}
    for number in sorted({len(one.query.objects) for one in shown}, reverse=True):
        groups = {str(number): [one.number for one in shown if len(one.query.objects) == number], **groups}
    return {
        name: Figures.of([verdicts[n] for n in own], [chance[n] for n in own if n in chance])
        for name, own in groups.items()
    }


def shuffled(shown: Sequence[Shown], seed: int = 0) -> dict[int, Verdict]:
    """Each image by the caption of another with as many objects: a random ring, so that none keeps its own."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[int, Verdict] = {}
    for number in {len(one.query.objects) for one in shown}:
        group = [one for one in shown if len(one.query.objects) == number]
        ring = [group[i] for i in torch.randperm(len(group), generator=generator).tolist()]
        if len(ring) > 1:
            found |= {one.number: one.against(ring[i - 1]) for i, one in enumerate(ring)}
    return found


def table(found: dict[str, Figures], title: str = "Adherence") -> Table:
    """A column for each number of objects."""
    names = [name for name in ATTRIBUTES if any(name in one.attributes for one in found.values())]
    rows: list[tuple[str, ...]] = [("images", *(f"{one.right.count:,}" for one in found.values()))]
    rows.append(("**all right**", *(f"**{one.right.words}**" for one in found.values())))
    for name in names:
        rows.append((name, *(one.attributes.get(name, Share(0, 0)).words for one in found.values())))
    rows.append(("not readable", *(one.unreadable.words for one in found.values())))
    rows.append(("colour of another object", *(one.bled.words for one in found.values())))
    rows.append(("all right by another's caption", *(one.shuffled.words for one in found.values())))
    columns = ("", *(f"{key} object{'' if key == '1' else 's'}" if key != "all" else "all" for key in found))
    note = (
        "Shares of images, with Wilson's 95 % interval. An attribute is right where all objects have it right; it is "
        "a share of the captions that say it. What cannot be read is not right. "
        "'Colour of another object' is a share of the captions with different shapes."
    )
    return Table(title, columns, tuple(rows), note)
