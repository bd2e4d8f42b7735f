"""Ids word by word: those of the tokenizer itself, for every caption of the world and for any text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scene_cases import tokenizer

from pellucid.core.errors import PellucidError
from pellucid.interop.tokenizer import Tokenizer
from pellucid.scenes import STYLE_NAMES, captions, sample
from pellucid.train import text
from pellucid.train.source import Batch
from pellucid.train.text import CaptionIds, WordIds, tokens

WORDS = st.sampled_from(
    ["a", "STAR,", "<|endoftext|>", "x<|startoftext|>y", "it's", "naïve", "Σίσυφος", "2nd", "\t", ""]
)
TEXTS = st.one_of(st.text(max_size=60), st.lists(WORDS, max_size=12).map(" ".join))


def slow(one: Tokenizer, texts: list[str]) -> torch.Tensor:
    """The long way: the whole text through the tokenizer, cut at the window's end."""
    return torch.tensor([one.window(one.ids(text)[: one.room]) for text in texts])


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("style", [False, True])
def test_every_phrasing_has_the_tokenizers_ids(full: bool, style: bool) -> None:
    told = captions(sample(torch.arange(400), 1, "any", STYLE_NAMES), 2, full=full, style=style)
    assert torch.equal(tokens(tokenizer(), told), slow(tokenizer(), told))


@settings(max_examples=300, deadline=None)
@given(TEXTS)
@example("a \u0308 b")  # an accent that stands alone after a space
@example("e \u2028\u0301  \x1c\u3000 x")
def test_any_text_has_the_tokenizers_ids(text: str) -> None:
    assert torch.equal(tokens(tokenizer(), [text]), slow(tokenizer(), [text]))


def test_added_tokens_bring_all_their_vectors() -> None:
    grown = tokenizer().add("<new>", 3)
    texts = ["a <new> star", "a<new>star", "<new>", "new <new <new> >"]
    assert torch.equal(tokens(grown, texts), slow(grown, texts))
    assert tokens(grown, ["<new>"]).eq(tokens(tokenizer(), ["<new>"])).all().item() is False


def test_tokens_that_hold_a_space_are_not_cut() -> None:
    grown = tokenizer().add("red star", 2)
    assert not WordIds(grown).wordwise
    texts = ["a red star", "a red  star", "red", "red star red star"]
    assert torch.equal(tokens(grown, texts), slow(grown, texts))


def test_words_without_end_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MOST_WORDS", 5)
    words = WordIds(tokenizer())
    for number in range(40):
        assert words.window(f"a{number} b{number}") == WordIds(tokenizer()).window(f"a{number} b{number}")
        assert len(words) <= 5


def test_no_captions_are_no_rows_and_half_a_character_is_one_line() -> None:
    assert tokens(tokenizer(), []).shape == (0, tokenizer().length)
    with pytest.raises(PellucidError, match="prompt must be text"):
        tokens(tokenizer(), ["a \ud800"])


def test_ids_of_a_batch_are_taken_once_they_are_seen_to_be_right() -> None:
    told = ("a red star", "a blue ring")
    own, images = tokens(tokenizer(), told), torch.zeros(2, 3, 8, 8)
    ids = CaptionIds(tokenizer())
    assert torch.equal(ids.of(Batch(images, captions=told)), own)
    with pytest.raises(PellucidError) as error:
        ids.of(Batch(images, captions=told, tokens=own.flip(0)))
    assert error.value.code == "data-tokens"
    with pytest.raises(PellucidError):
        ids.of(Batch(images, captions=told, tokens=own[:, :-1]))
    assert ids.of(Batch(images, captions=told, tokens=own)) is own
    again = own.clone()
    assert ids.of(Batch(images, captions=told, tokens=again)) is again
