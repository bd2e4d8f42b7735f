"""A tokenizer learnt from captions: the greedy rule, the same files every time, and the ids of transformers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import CLIPTokenizer

from pellucid.core.errors import PellucidError
from pellucid.interop.tokenizer import WORD_END, Tokenizer
from pellucid.scenes import STYLE_NAMES, captions, sample
from pellucid.train.scenes_source import scenes_tokenizer
from pellucid.train.text import FIXED, count_words, learn_merges, train_tokenizer

COMMITTED = Path(__file__).parents[2] / "configs" / "scenes_tokenizer"
TEXTS = [
    "a red star on a red background",
    "The large STAR, starboard of a restarted bar",
    "naïve café: 2 stars & 17 bars, isn't it?",
    "日本語 star — a bar",
]


def slow_merges(words: Counter[str], count: int) -> list[tuple[str, str]]:
    """The rule as it is told: count all pairs, join the most frequent everywhere, start again."""
    spelled = {word: (*word[:-1], word[-1] + WORD_END) for word in words}
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, letters in spelled.items():
            for i in range(len(letters) - 1):
                pairs[letters[i], letters[i + 1]] += words[word]
        if not pairs or max(pairs.values()) < 2:
            return merges
        best = sorted(pairs, key=lambda pair: (-pairs[pair], pair))[0]
        merges.append(best)
        for word, letters in spelled.items():
            text = "\x00" + "\x00".join(letters) + "\x00"
            joined, old = "\x00" + "".join(best) + "\x00", "\x00" + "\x00".join(best) + "\x00"
            while old in text:
                text = text.replace(old, joined, 1)
            spelled[word] = tuple(text.strip("\x00").split("\x00"))
    return merges


def test_each_merge_joins_the_most_frequent_pair() -> None:
    words = count_words(TEXTS * 2 + ["aaaa aaa banana bandana"] * 3)
    assert learn_merges(words, 10_000) == slow_merges(words, 10_000)
    assert learn_merges(words, 12) == slow_merges(words, 12)


def test_words_become_one_entry_and_the_size_is_kept() -> None:
    whole = train_tokenizer(TEXTS * 2, size=2000)
    assert all(len(whole.ids(word)) == 1 for word in ("star", "background", "restarted", "Large"))
    small = train_tokenizer(TEXTS * 2, size=FIXED + 5, length=20)
    assert small.size == FIXED + 5 < whole.size < 2000
    assert len(small.encode("a red star")) == small.length == 20


def test_the_order_of_captions_changes_nothing(tmp_path: Path) -> None:
    for name, texts in (("one", TEXTS * 2), ("two", TEXTS[::-1] * 2)):
        train_tokenizer(texts, size=600).save(tmp_path / name)
    for file in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_transformers_reads_the_same_ids(tmp_path: Path) -> None:
    ours = train_tokenizer(TEXTS * 2, size=640, length=32)
    ours.save(tmp_path)
    theirs = CLIPTokenizer.from_pretrained(str(tmp_path))
    again = Tokenizer.load(tmp_path)
    assert theirs.model_max_length == again.length == 32
    for text in [*TEXTS, "", "unseen wörds 😀"]:
        want = theirs(text, padding="max_length", truncation=True).input_ids
        assert again.encode(text) == ours.encode(text) == want


@pytest.mark.parametrize(
    ("captions", "options", "code"),
    [
        (TEXTS, {"size": FIXED - 1}, "tokenizer-size"),
        (TEXTS, {"size": 10**6}, "tokenizer-size"),
        (TEXTS, {"length": 2}, "tokenizer-size"),
        ([], {}, "captions-empty"),
        (["", " \n"], {}, "captions-empty"),
    ],
)
def test_refusals(captions: list[str], options: dict[str, int], code: str) -> None:
    with pytest.raises(PellucidError) as caught:
        train_tokenizer(captions, **options)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_the_tokenizer_of_the_recipes_knows_every_word_of_the_world(tmp_path: Path) -> None:
    scenes_tokenizer().save(tmp_path)
    for file in sorted(path.name for path in COMMITTED.iterdir()):
        assert (tmp_path / file).read_bytes() == (COMMITTED / file).read_bytes(), file
    tokenizer = Tokenizer.load(COMMITTED)
    assert tokenizer.size <= 2000
    assert tokenizer.length == 64
    for caption in captions(sample(torch.arange(2000), 1, "any", STYLE_NAMES)):
        words = tokenizer.words(caption)
        assert {len(word) for word in words} == {1}, caption
        assert len(words) <= tokenizer.room, caption
