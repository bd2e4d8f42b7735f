"""Captions are true, say the same when read back, and keep to a small vocabulary."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from pellucid.core.errors import PellucidError
from pellucid.scenes import (
    STYLE_NAMES,
    ObjectQuery,
    Query,
    captions,
    described,
    parse,
    prompts,
    sample,
    satisfied,
    vocabulary,
)
from pellucid.scenes import words as w
from pellucid.scenes.words import held_out_combination

MANY = torch.arange(8000)


@pytest.fixture(scope="module")
def told():
    scenes = sample(MANY, 3, "any", STYLE_NAMES)
    return scenes, described(scenes, 11)


def test_round_trip(told):
    for caption, query in told[1]:
        assert parse(caption) == query, caption


@pytest.mark.parametrize("full", [False, True])
def test_captions_are_true(full):
    scenes = sample(MANY[:1200], 5)
    for scene, (caption, query) in zip(scenes.scenes(), described(scenes, 2, full=full), strict=True):
        assert satisfied(scene, query), caption


def test_captions_of_others_are_not():
    scenes = sample(MANY[:600], 5)
    queries = [query for _, query in described(scenes, 2, full=True)]
    wrong = [satisfied(scene, query) for scene, query in zip(scenes.scenes(), queries[1:] + queries[:1], strict=True)]
    assert sum(wrong) <= 2


def test_words(told):
    used = {word for caption, _ in told[1] for word in caption.replace(",", " ").split()}
    assert used == set(vocabulary())
    assert len(vocabulary()) < 200
    assert max(len(caption.split()) for caption, _ in told[1]) <= 48


def test_every_phrase_and_relation_occurs(told):
    text = "\n".join(f" {caption}," for caption, _ in told[1])
    tables = (w.SHAPES, w.COLOURS, w.TEXTURES, w.WITH_TEXTURE, w.SIZES, w.PLACES, w.RELATIONS, w.BACKGROUNDS, w.STYLES)
    missing = [form for table in tables for forms in table.values() for form in forms if f" {form}" not in text]
    assert missing == []
    assert {name for _, query in told[1] for _, name, _ in query.relations} == set(w.RELATION_NAMES)


def test_one_scene_has_many_phrasings():
    scenes = sample(torch.tensor([1] * 64), objects=(2,))
    # One index is one phrasing of a seed; seeds differ.
    assert len(set(captions(scenes, 0))) == 1
    assert len({captions(scenes[:1], seed)[0] for seed in range(64)}) > 40
    orders = {described(scenes[:1], seed)[0][1].objects[0].colour for seed in range(64)}
    assert len(orders) == 2  # either may come first


def test_a_caption_does_not_depend_on_its_batch(told):
    scenes, pairs = told
    rows = torch.tensor([5, 0, 4999])
    assert captions(scenes[rows], 11) == [pairs[i][0] for i in rows.tolist()]


def test_articles(told):
    for caption, _ in told[1]:
        words = caption.split()
        for article, word in pairwise(words):
            if article in ("a", "an"):
                assert (article == "an") == (word[0] in "aeiou"), caption


def test_silence_about_the_style():
    scenes = sample(MANY[:300], styles=("neon",))
    assert all(query.style == "neon" for _, query in described(scenes))
    assert all(query.style is None for _, query in described(scenes, style=False))


def test_prompts_ask_for_what_training_never_saw():
    for caption, query in prompts(200, 2, seed=1):
        assert parse(caption) == query
        assert len(query.objects) == 2
        assert len(query.relations) == 1
        for one in query.objects:
            index = [
                torch.tensor(names.index(v))
                for names, v in (
                    (w.SHAPE_NAMES, one.shape),
                    (w.COLOUR_NAMES, one.colour),
                    (w.TEXTURE_NAMES, one.texture),
                )
            ]
            assert held_out_combination(*index)
            assert one.size is not None
        assert query.background is not None
    assert prompts(20, seed=1) != prompts(20, seed=2)
    assert [len(query.objects) for _, query in prompts(6, 1)] == [1] * 6


def test_captions_that_people_type():
    star = ObjectQuery("star", "red")
    assert parse("A red star.") == Query((star,))
    assert parse("a red star on a blue background").background == "pale blue"
    assert parse("an image of a big red star and an orange moon") == Query(
        (ObjectQuery("star", "red", size="large"), ObjectQuery("crescent", "orange"))
    )
    assert parse("a red star, a blue box and a pink ring in flat style").style == "flat"


@pytest.mark.parametrize(
    ("caption", "code"),
    [
        ("a crimson star", "caption-word"),
        ("a red", "caption-grammar"),
        ("red star", "caption-grammar"),
        ("a red star a blue square", "caption-grammar"),
        ("a red star above a blue box, and a pink ring below the green box", "caption-the"),
        ("a red star, a blue box, a pink ring and a teal heart", "caption-objects"),
        ("", "caption-grammar"),
        ("a " * 400, "caption"),
    ],
)
def test_bad_captions(caption, code):
    with pytest.raises(PellucidError) as caught:
        parse(caption)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_prompts_are_bounded():
    with pytest.raises(PellucidError, match="count must be from 1"):
        prompts(0)
