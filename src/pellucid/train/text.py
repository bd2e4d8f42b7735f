"""The text side of training: tokenizers, captions to ids, and the encoders that read them."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.interop import source
from pellucid.interop.components import KINDS, TEXT_PARTS, TOKENIZER_PARTS
from pellucid.interop.tokenizer import BOS, EOS, LENGTH, WORD_END, Tokenizer, byte_letters, clip_core
from pellucid.models.clip import CLIPTextEncoder
from pellucid.pipeline.encoders.text import text_parts_of
from pellucid.train.draws import seeded
from pellucid.train.initial import start_clip
from pellucid.train.source import Batch

# --- Tokenizers from captions ---------------------------------------------------------------------------------------

FIXED = 2 * 256 + 2  # entries that every tokenizer of CLIP's layout has: bytes, bytes that end a word, BOS and EOS
_MOST = 49_408  # entries of CLIP's own
_LEAST_SEEN = 2  # a pair that occurs once is not merged
MergePair = tuple[str, str]


def train_tokenizer(captions: Iterable[str], *, size: int = 2000, length: int = LENGTH) -> Tokenizer:
    """A tokenizer of at most `size` entries, fewer where every word of the captions is one entry before.

    `length` counts the ids of one window of the encoder, BOS and EOS among them.
    """
    if not FIXED <= size <= _MOST:
        raise PellucidError(rule("size of a vocabulary", f"from {FIXED} to {_MOST}", size), "tokenizer-size")
    if not 3 <= length <= 1024:
        raise PellucidError(rule("length of a window", "from 3 to 1024 tokens", length), "tokenizer-size")
    words = count_words(captions)
    if not words:
        raise PellucidError(rule("captions", "texts with at least one word", "none"), "captions-empty")
    return Tokenizer.from_merges(learn_merges(words, size - FIXED), length=length)


def count_words(captions: Iterable[str]) -> Counter[str]:
    """How often each word occurs, as the BPE sees words: in lower case, its bytes as letters."""
    core = clip_core({}, [], EOS)
    words: Counter[str] = Counter()
    for caption in captions:
        text = core.normalizer.normalize_str(caption)
        words.update(word for word, _ in core.pre_tokenizer.pre_tokenize_str(text))
    for mark in (BOS, EOS):  # no words, although the pattern keeps them whole
        words.pop(mark, None)
    return words


def learn_merges(words: Counter[str], room: int) -> list[MergePair]:
    """The merges that make at most `room` new entries: each joins the pair that was most frequent when it was made."""
    spelled = {word: [*word[:-1], word[-1] + WORD_END] for word in words}
    counts: Counter[MergePair] = Counter()
    places: defaultdict[MergePair, set[str]] = defaultdict(set)
    for word, letters in spelled.items():
        for pair in itertools.pairwise(letters):
            counts[pair] += words[word]
            places[pair].add(word)
    merges: list[MergePair] = []
    made = {letter + end for letter in byte_letters() for end in ("", WORD_END)}
    base = len(made)
    while counts and len(made) - base < room:
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        if counts[best] < _LEAST_SEEN:
            break
        merges.append(best)
        made.add("".join(best))
        for word in places.pop(best):
            old = spelled[word]
            new = spelled[word] = _joined(old, best)
            for pair in itertools.pairwise(old):
                counts[pair] -= words[word]
            for pair in itertools.pairwise(new):
                counts[pair] += words[word]
                places[pair].add(word)
        counts = Counter({pair: count for pair, count in counts.items() if count > 0})
    return merges


def _joined(letters: list[str], pair: MergePair) -> list[str]:
    """The letters of a word with every occurrence of a pair made one, from the left."""
    out: list[str] = []
    i = 0
    while i < len(letters):
        if i + 1 < len(letters) and (letters[i], letters[i + 1]) == pair:
            out.append(letters[i] + letters[i + 1])
            i += 2
        else:
            out.append(letters[i])
            i += 1
    return out


# --- Captions to ids ------------------------------------------------------------------------------------------------

MOST_WORDS = 2**16  # that are cached: captions from the web have an unlimited number of words
_ID = np.dtype(np.int32)


class WordIds(dict[str, bytes]):
    """A word (what is between two spaces) → its ids, as bytes to join."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        # Elsewhere a word's ids may depend on its neighbours: a tokenizer.json may do anything, and an added token may
        # hold a space.
        added = tokenizer.core.get_added_tokens_decoder().values()
        self.wordwise = tokenizer.clip and all(token.content.split() == [token.content] for token in added)
        self.ends = [
            np.array([tokenizer.eos, *[tokenizer.pad] * (tokenizer.room - used)], _ID).tobytes()
            for used in range(tokenizer.room + 1)
        ]
        self.start = np.array([tokenizer.bos], _ID).tobytes()

    def __missing__(self, word: str) -> bytes:
        found = np.array(self.tokenizer.ids(word), _ID).tobytes()
        if len(self) >= MOST_WORDS:
            self.clear()
        self[word] = found
        return found

    def window(self, caption: str) -> bytes:
        """One window: BOS, as many ids as it has room for, EOS, padding."""
        words = caption.split(" ") if self.wordwise else (caption,)
        ids = b"".join([self[word] for word in words])[: self.tokenizer.room * _ID.itemsize]
        return self.start + ids + self.ends[len(ids) // _ID.itemsize]


@lru_cache(maxsize=8)
def _words_of(tokenizer: Tokenizer) -> WordIds:
    return WordIds(tokenizer)


def tokens(tokenizer: Tokenizer, captions: Sequence[str]) -> Tensor:
    """(B, L) int64: one window per caption. A longer caption is cut at the window's end: a run is not stopped
    by one long text."""
    words = _words_of(tokenizer)
    flat = np.frombuffer(b"".join([words.window(caption) for caption in captions]), _ID)
    return torch.from_numpy(flat.astype(np.int64)).reshape(len(captions), tokenizer.length)


# --- Text encoders --------------------------------------------------------------------------------------------------

_FRESH = "CLIPTextModel"


@dataclass(frozen=True)
class TextConfig:
    """Where text becomes numbers. `folder` is a pipeline's, with text_encoder/ and tokenizer/. Or `encoder` is the
    config of a fresh CLIPTextModel, and the tokenizer in the folder `tokenizer` decides its vocabulary and window.

    `train`: the encoder learns together with the denoiser; else it stays as it was read.
    """

    folder: str = ""
    encoder: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str = ""
    train: bool = False

    def __post_init__(self) -> None:
        if bool(self.folder) == bool(self.encoder) or bool(self.encoder) != bool(self.tokenizer):
            given = [name for name in ("folder", "encoder", "tokenizer") if getattr(self, name)]
            raise PellucidError(
                rule("text", "a folder, or an encoder with a tokenizer", ", ".join(given) or "none"), "config-value"
            )
        if self.encoder and not self.train:
            advice = "An untrained encoder carries no information."
            raise PellucidError(rule("text.train", "true for a fresh encoder", False, advice), "config-value")

    def build(self, seed: int) -> TextSide:
        if self.folder:
            folder = source.locate(self.folder)
            encoder = source.load_component(folder / TEXT_PARTS[0], dtype=torch.float32)
            tokenizer = Tokenizer.load(folder / TOKENIZER_PARTS[0])
        else:
            tokenizer = read_tokenizer(self.tokenizer)
            encoder = fresh_encoder(self.encoder, tokenizer, seed)
        if not isinstance(encoder, CLIPTextEncoder) or encoder.text_projection is not None:
            kind = type(encoder).__name__ if not isinstance(encoder, CLIPTextEncoder) else "one with a projection"
            raise PellucidError(rule("text encoder", "a CLIPTextModel", kind), "class")
        (part,) = text_parts_of([encoder], [tokenizer])  # a pipeline's own view of the two: one window for both
        check_vocabulary(part.tokenizer, encoder.config.vocab_size)
        return TextSide(encoder.eval().requires_grad_(self.train), part.tokenizer, self.train)


@dataclass(frozen=True)
class TextSide:
    """An encoder, its tokenizer, and whether the encoder is trained."""

    encoder: CLIPTextEncoder
    tokenizer: Tokenizer
    trained: bool

    @torch.no_grad()
    def context(self, ids: Tensor) -> Tensor:
        """(B, L, D) float32 of ids (B, L): the last layer after the final norm, as Stable Diffusion reads it."""
        return self.encoder(ids).last.float()


def read_tokenizer(folder: str) -> Tokenizer:
    if not Path(folder).is_dir():
        raise PellucidError(rule("tokenizer", "a folder that exists", folder), "tokenizer-files")
    return Tokenizer.load(folder)


def fresh_encoder(raw: Mapping[str, Any], tokenizer: Tokenizer, seed: int) -> CLIPTextEncoder:
    """A CLIPTextModel with random weights from a seed. The tokenizer supplies the fields that it determines."""
    settings = KINDS[_FRESH].read({**known_of(tokenizer), **raw})
    with seeded(seed):
        return start_clip(CLIPTextEncoder(settings))  # type: ignore[return-value]


def known_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of an encoder's config that its tokenizer determines."""
    return {
        "vocab_size": tokenizer.size,
        "max_position_embeddings": tokenizer.length,
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eos,
        "pad_token_id": tokenizer.pad,
    }


def check_vocabulary(tokenizer: Tokenizer, size: int) -> None:
    if tokenizer.size > size:
        must = f"at most {size}, the size of the text encoder's table"
        advice = "Tokenizer and encoder do not belong together."
        raise PellucidError(rule("entries of the tokenizer", must, tokenizer.size, advice), "token-id")


class CaptionIds:
    """The ids of a batch's captions by one tokenizer. Those that come with a batch are compared once, then taken."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.trusted = tokenizer, False

    def of(self, batch: Batch) -> Tensor:
        """(B, L) int64 on the images' device."""
        captions, given = captions_of(batch), batch.tokens
        if given is not None and self.trusted:
            return given
        own = tokens(self.tokenizer, captions)
        if given is None:
            return own.to(batch.images.device, non_blocking=True)
        if not torch.equal(given.cpu(), own):
            advice = "Make the cache again with the tokenizer of this config."
            raise PellucidError(f"tokens of the data must be of this tokenizer; got others. {advice}", "data-tokens")
        self.trusted = True
        return given


def captions_of(batch: Batch) -> tuple[str, ...]:
    if batch.captions is None or len(batch.captions) != len(batch.images):
        got = "none" if batch.captions is None else len(batch.captions)
        raise PellucidError(rule("data", "with one caption per image", got), "data-captions")
    return batch.captions
