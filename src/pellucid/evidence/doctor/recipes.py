"""Checks of how an image was made: its size and guidance against the model's, and what another program said."""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.evidence.doctor.checks import Unable, check
from pellucid.evidence.doctor.finding import Finding
from pellucid.evidence.doctor.subject import Subject
from pellucid.models.guidance import GUARDED_SCALE, Guidance
from pellucid.pipeline.request import Request

BURNING = 15.0  # a scale at which plain guidance burns colours in every family
LARGER = 2.0  # times the pixels that a model was trained on


@check("guidance of the recipe", needs=("recipe",))
def guidance(subject: Subject) -> Iterator[Finding]:
    """A scale that burns colours, with nothing against it."""
    told = (subject.recipe or {}).get("guidance")
    if not told:
        raise Unable("the recipe names no guidance")
    asked = Guidance.from_dict(told)
    most = asked.most
    if not asked.untamed:
        return
    yield Finding(
        "guidance-high",
        "warning" if most >= BURNING else "note",
        f"the guidance scale is {most:g}, with no rule against burnt colours",
        (("scale", most), ("guarded at", GUARDED_SCALE)),
        "Guidance adds the difference of two predictions so many times over: the predicted image leaves the range of "
        "images, colours saturate and bleed.",
        f'--guidance "guarded {most:g}", or --guidance "{most:g} + rescale"',
    )


@check("size of the recipe", needs=("recipe", "pipeline"))
def size(subject: Subject) -> Iterator[Finding]:
    """An image of another size than the model was trained on."""
    asked = (subject.recipe or {}).get("size")
    if asked is None:
        raise Unable("the recipe names no size")
    assert subject.pipeline is not None
    own = subject.pipeline.size_of(Request())
    ratio = asked[0] * asked[1] / (own[0] * own[1])
    if not 1 / LARGER <= ratio <= LARGER:
        yield Finding(
            "size-off",
            "warning",
            f"the image has {ratio:.2g} times the pixels that the model was trained on",
            (("width", asked[0]), ("height", asked[1]), ("trained width", own[0]),
             ("trained height", own[1])),
            "Larger images repeat their subject, smaller ones lose it: the network knows structures of one size.",
            f"--size {own[0]}x{own[1]}; enlarge afterwards with --image and a low --strength",
        )  # fmt: skip


@check("words of another program", needs=("recipe",))
def foreign(subject: Subject) -> Iterator[Finding]:
    """Settings of an A1111 text that are not read here."""
    recipe = subject.recipe or {}
    unread = dict(recipe.get("unread") or {})
    if unread:
        yield Finding(
            "recipe-unread",
            "note",
            f"{len(unread)} settings of the image's text are not read here",
            tuple((name or "rest", value[:60]) for name, value in unread.items()),
            "Another program made the image, and has settings that Pellucid has no words for.",
            "Repeat it by hand where they matter: pellucid sample --from FILE says what it takes.",
        )
