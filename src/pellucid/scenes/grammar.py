"""Captions: written by a small grammar, and parsed back into what they ask of an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple, TypeVar

import torch

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.scenes import sampling
from pellucid.scenes import words as w
from pellucid.scenes.relations import NARROW, holding
from pellucid.scenes.sampling import OBJECTS, sample
from pellucid.scenes.scene import PLACE_CUTS, Scene, Scenes
from pellucid.scenes.words import RELATION_NAMES, Split

# --- What a caption asks for ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObjectQuery:
    """One object that a caption asks for; None is not mentioned. A caption without a texture asks for a solid one."""

    shape: str
    colour: str
    texture: str = "solid"
    size: str | None = None
    place: str | None = None


@dataclass(frozen=True)
class Query:
    """What a caption asks for: objects as they are mentioned, relations as (i, relation, j), background and style."""

    objects: tuple[ObjectQuery, ...]
    relations: tuple[tuple[int, str, int], ...] = ()
    background: str | None = None
    kind: str | None = None
    style: str | None = None


def satisfied(scene: Scene, query: Query) -> bool:
    """Whether a scene is what a query asks for. Colours name the objects: a scene has each of them once."""
    if len(scene.things) != len(query.objects):
        return False
    order = [thing.colour for thing in scene.things]
    if sorted(order) != sorted(wanted.colour for wanted in query.objects):
        return False
    where = [order.index(wanted.colour) for wanted in query.objects]
    for wanted, i in zip(query.objects, where, strict=True):
        thing = scene.things[i]
        said = [(wanted.shape, thing.shape), (wanted.texture, thing.texture)]
        said += [(wanted.size, thing.size), (wanted.place, thing.place)]
        if any(asked not in (None, is_) for asked, is_ in said):
            return False
    frame = [(query.background, scene.background), (query.kind, scene.kind), (query.style, scene.style)]
    if any(asked not in (None, is_) for asked, is_ in frame):
        return False
    table = holding(Scenes.of([scene]), NARROW)[0]
    return all(bool(table[where[i], where[j], RELATION_NAMES.index(name)]) for i, name, j in query.relations)


# --- Captions from scenes -------------------------------------------------------------------------------------------

_SLOTS = 40
_STREAM = 2
_FULL = 2**32
_TRIPLES = tuple(permutations(range(3)))
_T = TypeVar("_T")
# The relations of every mask of bits.
_NAMED = [
    [n for bit, n in enumerate(w.RELATION_NAMES) if mask >> bit & 1] for mask in range(2 ** len(w.RELATION_NAMES))
]
# Phrases by number, as facts have them.
_SHAPES, _COLOURS, _TEXTURES, _SIZES = (tuple(t.values()) for t in (w.SHAPES, w.COLOURS, w.TEXTURES, w.SIZES))
_SOLID = w.TEXTURE_NAMES.index("solid")

# How often something is left out or phrased in another way.
_NO_SIZE, _NO_BACKGROUND, _NO_RELATION, _NO_KIND = 0.12, 0.15, 0.10, 0.25
_SAID_SOLID, _SAID_PLAIN, _SAID_PLACE, _SAID_FLAT, _PREFIX, _BACKGROUND_FIRST = 0.15, 0.2, 0.5, 0.1, 0.2, 0.12


class _Dice:
    """The numbers of one caption, taken one after another."""

    __slots__ = ("next",)

    def __init__(self, numbers: list[int]) -> None:
        self.next = iter(numbers).__next__

    def one(self, options: Sequence[_T]) -> _T:
        return options[self.next() % len(options)]

    def chance(self, share: float) -> bool:
        return self.next() < share * _FULL


class _Facts(NamedTuple):
    """One scene as plain numbers: its things, its frame, and which relations hold, as bits [i][j]."""

    shape: list[int]
    colour: list[int]
    texture: list[int]
    size: list[int]
    place: int
    holds: list[list[int]]
    count: int
    background: int
    kind: int
    style: int


class _Noun(NamedTuple):
    """One thing of a caption: the fields of `ObjectQuery`, and its words."""

    shape: str
    colour: str
    texture: str
    size: str | None
    place: str | None
    words: str


class _Caption(NamedTuple):
    """A caption, and the parts of its `Query`."""

    words: str
    nouns: list[_Noun]
    links: list[tuple[int, str, int]]
    background: str | None
    kind: str | None
    style: str | None

    @property
    def query(self) -> Query:
        wanted = tuple(ObjectQuery(*noun[:5]) for noun in self.nouns)
        return Query(wanted, tuple(self.links), self.background, self.kind, self.style)


def _facts(scenes: Scenes) -> list[_Facts]:
    bits = (holding(scenes).long() << torch.arange(len(w.RELATION_NAMES), device=scenes.x.device)).sum(-1)
    cuts = torch.tensor(PLACE_CUTS, dtype=torch.float64, device=scenes.x.device)
    column, row = (torch.bucketize(v[:, 0].double(), cuts) for v in (scenes.x, scenes.y))  # as `place_of` has it
    columns = [scenes.shape, scenes.colour, scenes.texture, scenes.size, 3 * row + column, bits]
    columns += [scenes.count, scenes.background, scenes.kind, scenes.style]
    return list(map(_Facts, *(column.cpu().numpy().tolist() for column in columns)))


def captions(scenes: Scenes, seed: int = 0, *, full: bool = False, style: bool = True) -> list[str]:
    """A caption per scene. `full` leaves nothing out; without `style` no style is named, for the training of a LoRA."""
    return phrasings(scenes, (seed,), full=full, style=style)[0]


def phrasings(scenes: Scenes, seeds: Sequence[int], *, full: bool = False, style: bool = True) -> list[list[str]]:
    """Captions of the same scenes by several seeds: one list per seed."""
    known = _facts(scenes)
    return [[one.words for one in _captions_of(scenes, known, seed, full, style)] for seed in seeds]


def described(scenes: Scenes, seed: int = 0, *, full: bool = False, style: bool = True) -> list[tuple[str, Query]]:
    """Captions, each with what it asks for."""
    return [(one.words, one.query) for one in _captions_of(scenes, _facts(scenes), seed, full, style)]


def _captions_of(scenes: Scenes, known: Sequence[_Facts], seed: int, full: bool, style: bool) -> list[_Caption]:
    numbers = sampling.random_words(scenes.index.cpu(), seed, _SLOTS, _STREAM).numpy().tolist()
    return [_caption_of(fact, _Dice(row), full, style) for fact, row in zip(known, numbers, strict=True)]


def _caption_of(fact: _Facts, dice: _Dice, full: bool, style: bool) -> _Caption:
    sized = not dice.chance(_NO_SIZE) or full
    order, links = _mention(fact, dice, full)
    nouns = [_noun(fact, i, sized, dice) for i in order]
    text = _sentence(nouns, links, dice)
    background, kind, ground = _backdrop(fact, dice, full)
    first = dice.chance(_BACKGROUND_FIRST)
    prefix = dice.one(w.PREFIXES) if dice.chance(_PREFIX) else ""
    text = f"{prefix} {text}" if prefix else text
    if ground:
        text = f"{ground}, {text}" if first else f"{text} {ground}"
    name, words = _manner(fact, dice, style)
    return _Caption(f"{text}, {words}" if words else text, nouns, links, background, kind, name)


def _mention(fact: _Facts, dice: _Dice, full: bool) -> tuple[Sequence[int], list[tuple[int, str, int]]]:
    """The order of mention, and the relations between positions in it."""
    listed = dice.chance(_NO_RELATION) and not full
    turn, chosen = dice.next(), dice.next()
    if fact.count == 1:
        return (0,), []
    if fact.count == 2:
        order = (0, 1) if turn & 1 else (1, 0)
        name = _relation(fact.holds[order[0]][order[1]], chosen)
        return order, [] if listed or name is None else [(0, name, 1)]
    for step in range(12):  # orders, and whether the third is related to the second or the second to it
        turned, which = divmod((turn + step) % 12, 2)
        a, b, c = _TRIPLES[turned]
        anchor = 1 if which else chosen & 1
        name = _relation(fact.holds[a][b], chosen >> 1)
        mask = fact.holds[b][c] if which else fact.holds[c][(a, b)[anchor]]
        other = _relation(mask, chosen >> 5)
        if name is not None and other is not None:
            last = (1, other, 2) if which else (2, other, anchor)
            return (a, b, c), [] if listed else [(0, name, 1), last]
    return (0, 1, 2), []


def _relation(mask: int, number: int) -> str | None:
    """One of the relations that hold."""
    names = _NAMED[mask]
    return names[number % len(names)] if names else None


def _noun(fact: _Facts, i: int, sized: bool, dice: _Dice) -> _Noun:
    """'a small striped red star'"""
    shape, colour, texture, size = fact.shape[i], fact.colour[i], fact.texture[i], fact.size[i]
    form = dice.next() % 8
    text = f"{dice.one(_SIZES[size])} " if sized else ""
    hue, what, feel = dice.one(_COLOURS[colour]), dice.one(_SHAPES[shape]), dice.one(_TEXTURES[texture])
    said = texture != _SOLID or dice.chance(_SAID_SOLID)
    name = w.TEXTURE_NAMES[texture]
    if texture != _SOLID and form == 7:
        text += f"{hue} {what} {dice.one(w.WITH_TEXTURE[name])}"
    elif said:
        text += f"{hue} {feel} {what}" if form in (5, 6) else f"{feel} {hue} {what}"
    else:
        text += f"{hue} {what}"
    place = w.PLACE_NAMES[fact.place] if fact.count == 1 and dice.chance(_SAID_PLACE) else None
    where = f" {dice.one(w.PLACES[place])}" if place else ""
    told_size = w.SIZE_NAMES[size] if sized else None
    words = f"{_article(text)} {text}{where}"
    return _Noun(w.SHAPE_NAMES[shape], w.COLOUR_NAMES[colour], name, told_size, place, words)


def _article(text: str) -> str:
    return "an" if text[0] in "aeiou" else "a"


def _sentence(nouns: list[_Noun], links: list[tuple[int, str, int]], dice: _Dice) -> str:
    words = [noun.words for noun in nouns]
    if not links:
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    that = "that is " if dice.chance(0.1) else ""
    text = f"{words[0]} {that}{dice.one(w.RELATIONS[links[0][1]])} {words[1]}"
    if len(words) == 2:
        return text
    i, name, j = links[1]
    how = dice.one(w.RELATIONS[name])
    if i == 1:
        return f"{text}, which is {how} {words[2]}"
    return f"{text}, and {words[2]} {how} the {nouns[j].colour} {nouns[j].shape}"


def _backdrop(fact: _Facts, dice: _Dice, full: bool) -> tuple[str | None, str | None, str]:
    """'on a checkered grey background'"""
    silent = dice.chance(_NO_BACKGROUND) and not full
    name, kind = w.BACKGROUND_NAMES[fact.background], w.KIND_NAMES[fact.kind]
    hue, feel = dice.one(w.BACKGROUNDS[name]), dice.one(w.KINDS[kind])
    said = dice.chance(_SAID_PLAIN) if kind == "plain" else not dice.chance(_NO_KIND) or full
    after = dice.chance(0.5) and kind == "gradient"
    if silent:
        return None, None, ""
    words = f"{hue} {feel}" if after else f"{feel} {hue}"
    return name, kind if said else None, f"on a {words if said else hue} background"


def _manner(fact: _Facts, dice: _Dice, style: bool) -> tuple[str | None, str]:
    """'in outlined style'; flat is the default and mostly not mentioned."""
    name = w.STYLE_NAMES[fact.style]
    words, said = dice.one(w.STYLES[name]), name != "flat" or dice.chance(_SAID_FLAT)
    return (name, words) if style and said else (None, "")


# --- Captions parsed ------------------------------------------------------------------------------------------------

_LONGEST = 512  # characters
_Phrase = tuple[str, str]  # what a phrase is, and its name


@lru_cache(maxsize=1)
def _phrases() -> dict[tuple[str, ...], list[_Phrase]]:
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
    found: dict[tuple[str, ...], list[_Phrase]] = {}
    for what, table in tables.items():
        for name, forms in table.items():
            for form in forms:
                found.setdefault(tuple(form.split()), []).append((what, name))
    glue = {"a": "article", "an": "article", "the": "the", "and": "and", ",": "comma", "on": "on"}
    glue |= {"which is": "which", "that is": "that", "background": "background"} | dict.fromkeys(w.PREFIXES, "prefix")
    for form, what in glue.items():
        found.setdefault(tuple(form.split()), []).append((what, form))
    return found


def _phrases_of(caption: str) -> list[list[_Phrase]]:
    """The caption as phrases, longest first; a phrase may be several things ('checkered')."""
    if not isinstance(caption, str) or len(caption) > _LONGEST:
        got = f"{len(caption)} characters" if isinstance(caption, str) else caption
        raise PellucidError(rule("caption", f"a text of at most {_LONGEST} characters", got), "caption")
    words = caption.lower().replace(",", " , ").rstrip(" .").split()
    table, at, found = _phrases(), 0, []
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
class _Parser:
    """Walks over the phrases of one caption."""

    found: list[list[_Phrase]]
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

    def noun(self) -> ObjectQuery:
        self.need("article")
        size, texture = self.take("size"), self.take("texture")
        colour = self.need("colour")
        texture = texture or self.take("texture")
        shape = self.need("shape")
        texture = texture or self.take("with") or "solid"
        return ObjectQuery(shape, colour, texture, size, self.take("place"))

    def ground(self) -> tuple[str | None, str | None]:
        """Colour and kind of the background, if the caption has one here."""
        if not self.take("on"):
            return None, None
        self.need("article")
        kind = self.take("kind")
        pale = f"pale {self.peek('colour')}"  # "on a blue background" can only mean the pale one
        name = self.take("ground") or (pale if pale in w.BACKGROUNDS and self.take("colour") else self.need("ground"))
        kind = kind or self.take("kind")
        self.need("background")
        return name, kind

    def objects(self) -> tuple[list[ObjectQuery], list[tuple[int, str, int]]]:
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

    def third(self, wanted: list[ObjectQuery], links: list[tuple[int, str, int]]) -> bool:
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
    reader = _Parser(_phrases_of(caption), caption)
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


# --- Prompts --------------------------------------------------------------------------------------------------------

_MOST_PROMPTS = 1_000_000


def prompts(
    count: int, objects: int | Sequence[int] = OBJECTS, seed: int = 0, split: Split = "held_out"
) -> list[tuple[str, Query]]:
    """Prompts that say all attributes. In the held-out split every object is a combination that training never saw."""
    if not 1 <= count <= _MOST_PROMPTS:
        raise PellucidError(rule("count", f"from 1 to {_MOST_PROMPTS:,}", count), "scenes-count")
    numbers = (objects,) if isinstance(objects, int) else objects
    scenes = sample(torch.arange(count), seed, split, ("flat",), numbers)
    return described(scenes, seed, full=True, style=False)
