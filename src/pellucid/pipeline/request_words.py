"""Words of a request that stand for more than themselves: a size, a class."""

from __future__ import annotations

import re

from pellucid.core.errors import PellucidError, rule


def size(name: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d{1,5})(?:\s*[x×]\s*(\d{1,5}))?\s*", text)
    if match is None or not int(match[1]) or match[2] == "0":
        raise PellucidError(rule(name, "WIDTHxHEIGHT in pixels, as 768x512", text[:80]), "size")
    return int(match[1]), int(match[2] or match[1])


def label(text: str) -> int | str:
    return int(text) if re.fullmatch(r"\d{1,9}", text) else text
