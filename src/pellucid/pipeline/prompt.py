"""Prompts as tokens: the grammar of weights, and chunks that each fill one window of a text encoder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.tokenizer import Tokenizer

STEP = 1.1  # what one pair of brackets multiplies or divides by
MAX_WEIGHT = 10.0
MAX_DEPTH = 24  # one bracket more and even 1.1 to that power is too heavy
MAX_CHUNKS = 10  # 750 tokens of CLIP's 77-token window, about 3,000 characters of English
MAX_CHARACTERS = 100_000  # beyond this a text is refused before it is tokenized

# An escaped bracket; an opening one; a weight that closes; a closing one; plain text.
MARKS = re.compile(r"\\[()\[\]\\]|[(\[]|:\s*(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+))\s*\)|[)\]]|[^\\()\[\]:]+|.", re.DOTALL)


class Token(NamedTuple):
    """A token of a prompt, as `describe` shows it."""

    text: str
    id: int
    weight: float


Chunk = tuple[tuple[int, float], ...]  # (id, weight) of the text's tokens in one window, without BOS and EOS


def parse(prompt: str) -> list[tuple[str, float]]:
    r"""The runs of a prompt with their weights.

    `(word)` weighs 1.1, `[word]` 1 / 1.1 and `(word:1.3)` 1.3; nested brackets multiply; `\(` is a bracket of the
    text. As in the interface that brought this grammar up, a bracket that is never closed reaches to the end, and
    one that closes nothing is text.
    """
    runs: list[tuple[str, float]] = []
    open_at: dict[str, list[int]] = {"(": [], "[": []}

    def scale(start: int, factor: float) -> None:
        runs[start:] = [(text, weight * factor) for text, weight in runs[start:]]

    for mark in MARKS.finditer(prompt):
        text, weight = mark[0], mark["weight"]
        if text in open_at:
            open_at[text].append(len(runs))
            check_depth(len(open_at[text]))
        elif weight is not None and open_at["("]:
            scale(open_at["("].pop(), float(weight))
        elif text == ")" and open_at["("]:
            scale(open_at["("].pop(), STEP)
        elif text == "]" and open_at["["]:
            scale(open_at["["].pop(), 1 / STEP)
        else:
            runs.append((text[1:] if len(text) == 2 and text[0] == "\\" else text, 1.0))
    for start in open_at["("]:
        scale(start, STEP)
    for start in open_at["["]:
        scale(start, 1 / STEP)
    return joined(runs)


def check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        advice = r"A bracket of the text is written \( or \[."
        raise PellucidError(rule("brackets of a prompt", f"at most {MAX_DEPTH} deep", depth, advice), "prompt-weight")


def joined(runs: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Neighbours of one weight are one run, so that a weight of 1 changes no token."""
    out: list[tuple[str, float]] = []
    for text, weight in runs:
        if not 0 <= weight <= MAX_WEIGHT:
            must = f"between 0 and {MAX_WEIGHT:g}"
            raise PellucidError(rule(f"weight of {text.strip()[:40]!r}", must, round(weight, 4)), "prompt-weight")
        if out and out[-1][1] == weight:
            out[-1] = (out[-1][0] + text, weight)
        else:
            out.append((text, weight))
    return out


def chunks(tokenizer: Tokenizer, prompt: str, *, weighting: bool = False) -> tuple[Chunk, ...]:
    """The tokens of a prompt, at most `tokenizer.room` a chunk; a prompt that needs over 10 chunks is an error.

    A chunk ends between two words, or inside one only where that word alone is longer than a chunk. The vectors of
    one embedding count as a word. An empty prompt is one empty chunk.
    """
    if isinstance(prompt, str) and len(prompt) > MAX_CHARACTERS:
        raise PellucidError(rule("prompt", f"at most {MAX_CHARACTERS} characters", len(prompt)), "prompt-length")
    runs = parse(prompt) if weighting and isinstance(prompt, str) else [(prompt, 1.0)]
    words = [(word, weight) for text, weight in runs for word in tokenizer.words(text)]
    found: list[list[tuple[int, float]]] = [[]]
    for piece, weight in pieces(words, tokenizer.room):
        if len(found[-1]) + len(piece) > tokenizer.room:
            found.append([])
        found[-1] += [(i, weight) for i in piece]
    if len(found) > MAX_CHUNKS:
        count = sum(len(word) for word, _ in words)
        raise PellucidError(
            f"prompt must be at most {MAX_CHUNKS} chunks of {tokenizer.room} tokens; got {count} tokens, "
            f"{len(found)} chunks. Shorten it: nothing is cut off silently.",
            "prompt-length",
        )
    return tuple(tuple(chunk) for chunk in found)


def pieces(words: Iterable[tuple[tuple[int, ...], float]], room: int) -> Iterator[tuple[tuple[int, ...], float]]:
    for word, weight in words:
        for start in range(0, len(word), room):
            yield word[start : start + room], weight


def describe(tokenizer: Tokenizer, prompt: str, *, weighting: bool = False) -> list[list[Token]]:
    """What the encoder reads, chunk by chunk: each token's text, id and weight."""
    found = chunks(tokenizer, prompt, weighting=weighting)
    return [[Token(tokenizer.token(i), i, weight) for i, weight in chunk] for chunk in found]
