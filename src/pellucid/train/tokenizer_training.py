"""A tokenizer of one's own: byte pair encoding (Sennrich et al. 2016) learnt from captions, in CLIP's layout.

The trainer of the `tokenizers` package breaks ties by the order of a hash table that differs from run to run; this one
breaks them by the text of the pair, so that the same captions give the same files.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.tokenizer import BOS, EOS, LENGTH, WORD_END, Tokenizer, byte_letters, clip_core

FIXED = 2 * 256 + 2  # entries that every tokenizer of CLIP's layout has: bytes, bytes that end a word, BOS and EOS
MOST = 49_408  # entries of CLIP's own
LEAST_SEEN = 2  # a pair that is seen once is no rule
Pair = tuple[str, str]


def train_tokenizer(captions: Iterable[str], *, size: int = 2000, length: int = LENGTH) -> Tokenizer:
    """A tokenizer of at most `size` entries, fewer where every word of the captions is one entry before.

    `length` counts the ids of one window of the encoder, BOS and EOS among them.
    """
    if not FIXED <= size <= MOST:
        raise PellucidError(rule("size of a vocabulary", f"from {FIXED} to {MOST}", size), "tokenizer-size")
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


def learn_merges(words: Counter[str], room: int) -> list[Pair]:
    """The merges that make at most `room` new entries: each joins the pair that was most frequent when it was made."""
    spelled = {word: [*word[:-1], word[-1] + WORD_END] for word in words}
    counts: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[str]] = defaultdict(set)
    for word, letters in spelled.items():
        for pair in itertools.pairwise(letters):
            counts[pair] += words[word]
            places[pair].add(word)
    merges: list[Pair] = []
    made = {letter + end for letter in byte_letters() for end in ("", WORD_END)}
    base = len(made)
    while counts and len(made) - base < room:
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        if counts[best] < LEAST_SEEN:
            break
        merges.append(best)
        made.add("".join(best))
        for word in places.pop(best):
            old = spelled[word]
            new = spelled[word] = joined(old, best)
            for pair in itertools.pairwise(old):
                counts[pair] -= words[word]
            for pair in itertools.pairwise(new):
                counts[pair] += words[word]
                places[pair].add(word)
        counts = Counter({pair: count for pair, count in counts.items() if count > 0})
    return merges


def joined(letters: list[str], pair: Pair) -> list[str]:
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
