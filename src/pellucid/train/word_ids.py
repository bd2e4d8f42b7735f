"""Captions to ids at the pace of a GPU: a byte-pair encoding looks at one word at a time, so a word is encoded once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from pellucid.interop.tokenizer import Tokenizer

MOST_WORDS = 2**16  # that are remembered: captions of the wild have words without end
ID = np.dtype(np.int32)


class WordIds(dict[str, bytes]):
    """What lies between two spaces → its ids, as bytes that only need to be put in a row."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        # Elsewhere a word's ids may depend on its neighbours: a tokenizer.json may do anything, and an added token may
        # hold a space.
        added = tokenizer.core.get_added_tokens_decoder().values()
        self.wordwise = tokenizer.clip and all(token.content.split() == [token.content] for token in added)
        self.ends = [
            np.array([tokenizer.eos, *[tokenizer.pad] * (tokenizer.room - used)], ID).tobytes()
            for used in range(tokenizer.room + 1)
        ]
        self.start = np.array([tokenizer.bos], ID).tobytes()

    def __missing__(self, word: str) -> bytes:
        found = np.array(self.tokenizer.ids(word), ID).tobytes()
        if len(self) >= MOST_WORDS:
            self.clear()
        self[word] = found
        return found

    def window(self, caption: str) -> bytes:
        """One window: BOS, as many ids as it has room for, EOS, padding."""
        words = caption.split(" ") if self.wordwise else (caption,)
        ids = b"".join([self[word] for word in words])[: self.tokenizer.room * ID.itemsize]
        return self.start + ids + self.ends[len(ids) // ID.itemsize]


@lru_cache(maxsize=8)
def words_of(tokenizer: Tokenizer) -> WordIds:
    return WordIds(tokenizer)


def tokens(tokenizer: Tokenizer, captions: Sequence[str]) -> Tensor:
    """(B, L) int64: one window a caption. A caption that is longer is cut at the window's end: a run is not stopped
    by one long text."""
    words = words_of(tokenizer)
    flat = np.frombuffer(b"".join([words.window(caption) for caption in captions]), ID)
    return torch.from_numpy(flat.astype(np.int64)).reshape(len(captions), tokenizer.length)
