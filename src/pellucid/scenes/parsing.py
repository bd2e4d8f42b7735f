"""A caption back to what it asks for: the inverse of the grammar in grammar.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.scenes import words as w
from pellucid.scenes.query import Query, Wanted

LONGEST = 512  # characters
Mark = tuple[str, str]  # what a phrase is, and its name


@lru_cache(maxsize=1)
def phrases() -> dict[tuple[str, ...], list[Mark]]:
    """Every phrase of the grammar as words, with what it may be."""
    tables = {
        "shape": w.SHAPES,
        "colour": w.COLOURS,
        "texture": w.TEXTURES,
        "with": w.WITH_TEXTURE,
        "size": w.SIZES,
        "place": w.PLACES,
        "relation": w.RELATIONS,
        "ground": w.BACKGROUNDS,
        "kind": w.KINDS,
        "style": w.STYLES,
    }
    found: dict[tuple[str, ...], list[Mark]] = {}
    for what, table in tables.items():
        for name, forms in table.items():
            for form in forms:
                found.setdefault(tuple(form.split()), []).append((what, name))
    glue = {"a": "article", "an": "article", "the": "the", "and": "and", ",": "comma", "on": "on"}
    glue |= {"which is": "which", "that is": "that", "background": "background"} | dict.fromkeys(w.PREFIXES, "prefix")
    for form, what in glue.items():
        found.setdefault(tuple(form.split()), []).append((what, form))
    return found


def marks(caption: str) -> list[list[Mark]]:
    """The caption as phrases, longest first; a phrase may be several things ('checkered')."""
    if not isinstance(caption, str) or len(caption) > LONGEST:
        got = f"{len(caption)} characters" if isinstance(caption, str) else caption
        raise PellucidError(rule("caption", f"a text of at most {LONGEST} characters", got), "caption")
    words = caption.lower().replace(",", " , ").rstrip(" .").split()
    table, at, found = phrases(), 0, []
    longest = max(map(len, table))
    while at < len(words):
        size = next((n for n in range(longest, 0, -1) if tuple(words[at : at + n]) in table), None)
        if size is None:
            hint = nearest(words[at], w.vocabulary())
            raise PellucidError(rule("caption", "made of the world's words", words[at], hint), "caption-word")
        found.append(table[tuple(words[at : at + size])])
        at += size
    return found


@dataclass
class Reader:
    """Walks over the phrases of one caption."""

    found: list[list[Mark]]
    caption: str
    at: int = 0

    def peek(self, what: str) -> str | None:
        """The name of the next phrase, if it may be this."""
        options = self.found[self.at] if self.at < len(self.found) else []
        return next((name for kind, name in options if kind == what), None)

    def take(self, what: str) -> str | None:
        name = self.peek(what)
        self.at += name is not None
        return name

    def need(self, what: str) -> str:
        name = self.take(what)
        if name is None:
            got = self.found[self.at][0][1] if self.at < len(self.found) else "the end"
            raise PellucidError(f"caption must have a {what} before {got!r}; got {self.caption!r}.", "caption-grammar")
        return name

    def noun(self) -> Wanted:
        self.need("article")
        size, texture = self.take("size"), self.take("texture")
        colour = self.need("colour")
        texture = texture or self.take("texture")
        shape = self.need("shape")
        texture = texture or self.take("with") or "solid"
        return Wanted(shape, colour, texture, size, self.take("place"))

    def ground(self) -> tuple[str | None, str | None]:
        """Colour and kind of the background, if one is told of here."""
        if not self.take("on"):
            return None, None
        self.need("article")
        kind = self.take("kind")
        pale = f"pale {self.peek('colour')}"  # "on a blue background" can only mean the pale one
        name = self.take("ground") or (pale if pale in w.BACKGROUNDS and self.take("colour") else self.need("ground"))
        kind = kind or self.take("kind")
        self.need("background")
        return name, kind

    def objects(self) -> tuple[list[Wanted], list[tuple[int, str, int]]]:
        wanted, links = [self.noun()], []
        self.take("that")
        if name := self.take("relation"):
            wanted.append(self.noun())
            links.append((0, name, 1))
            if self.third(wanted, links):
                return wanted, links
        else:
            while (self.peek("comma") and self.follows("article")) or self.peek("and"):
                self.at += 1
                wanted.append(self.noun())
        return wanted, links

    def follows(self, what: str) -> bool:
        """Whether the phrase after the next may be this."""
        return any(kind == what for kind, _ in (self.found[self.at + 1] if self.at + 1 < len(self.found) else []))

    def third(self, wanted: list[Wanted], links: list[tuple[int, str, int]]) -> bool:
        if not (self.peek("comma") and (self.follows("which") or self.follows("and"))):
            return False
        self.at += 1
        if self.take("which"):
            links.append((1, self.need("relation"), 2))
            wanted.append(self.noun())
            return True
        self.need("and")
        wanted.append(self.noun())
        name = self.need("relation")
        self.need("the")
        named = self.need("colour"), self.need("shape")
        which = [i for i, one in enumerate(wanted[:2]) if (one.colour, one.shape) == named]
        if len(which) != 1:
            raise PellucidError(
                rule("caption", "clear about 'the " + " ".join(named) + "'", self.caption), "caption-the"
            )
        links.append((2, name, which[0]))
        return True


def parse(caption: str) -> Query:
    """What a caption asks for."""
    reader = Reader(marks(caption), caption)
    background, kind = reader.ground()
    if background:
        reader.need("comma")
    reader.take("prefix")
    wanted, links = reader.objects()
    if background is None:
        background, kind = reader.ground()
    style = reader.need("style") if reader.take("comma") else reader.take("style")
    if reader.at < len(reader.found):
        rest = reader.found[reader.at][0][1]
        raise PellucidError(rule("caption", f"at its end before {rest!r}", caption), "caption-grammar")
    if len(wanted) > 3:
        raise PellucidError(rule("caption", "of one to three objects", len(wanted)), "caption-objects")
    return Query(tuple(wanted), tuple(links), background, kind, style)
