"""Our tokenizer gives the ids of transformers' CLIPTokenizer, whichever files a checkpoint came with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers
from transformers import CLIPTokenizer, CLIPTokenizerFast

from pellucid.core.errors import PellucidError
from pellucid.interop.tokenizer import BOS, EOS, PIECES, Tokenizer, clip_core

CORPUS = [
    "a photo of a cat sitting on a red chair",
    "the large blue circle, left of a small green square on a white background",
    "don't stop: it's a dog's life, they'll say we've been there!",
    "an oil painting in 4k, highly detailed, 1987",
]
TEXTS = [
    "",
    " ",
    "a photo of a cat",
    "A  Photo\tof\n a CAT",
    "don't stop, it's the dog's; we'll, I'd, they've, you're, I'm",
    "4k 1024x768 3.14 ½ ²",
    "naïve café — cafe\u0301 ﬁne Ångström",
    "日本語の猫 кошка قطة",
    "😀 👩‍🚀 ☃️!!",
    "<|startoftext|>a cat<|endoftext|> <|EndOfText|> <|endoftext|",
    "zero\u200bwidth non\u00a0breaking \ufeff mark",
    "(cat:1.3) [dog] {a|b} \\(escaped\\) !!! ... ???",
    "x" * 300,
    " ".join(CORPUS) * 20,
]


def merges(count: int = 90) -> list[tuple[str, str]]:
    """The first merges of a BPE trained on the corpus by the tokenizers package."""
    core = clip_core({}, [], EOS)
    core.model = models.BPE(end_of_word_suffix="</w>")
    trainer = trainers.BpeTrainer(vocab_size=400, end_of_word_suffix="</w>", show_progress=False)
    core.train_from_iterator(CORPUS, trainer)
    found = json.loads(core.to_str())["model"]["merges"]
    return [tuple(merge) for merge in found][:count]


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.from_merges(merges())


@pytest.fixture(scope="module")
def folder(ours: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    ours.save(path)
    return path


def layout(folder: Path, base: Path, **files: Any) -> Path:
    """A folder with the base's vocabulary and these JSON files."""
    folder.mkdir(exist_ok=True)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_text((base / name).read_text(encoding="utf-8"), encoding="utf-8")
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def assert_equal(ours: Tokenizer, theirs: Any, texts: list[str] = TEXTS) -> None:
    assert (ours.bos, ours.eos, ours.pad) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    for text in texts:
        assert ours.ids(text) == theirs(text, add_special_tokens=False).input_ids, text
        if len(ours.ids(text)) <= ours.room:
            want = theirs(text, padding="max_length", max_length=ours.length, truncation=True).input_ids
            assert ours.encode(text) == want, text


def test_clip_layout_starts_with_the_exclamation_mark(ours: Tokenizer) -> None:
    """SD 2 and SDXL pad with `!`, which is id 0 in OpenAI's vocabulary; its end-of-word form is id 256."""
    assert ours.core.token_to_id("!") == 0
    assert ours.core.token_to_id("!</w>") == 256
    assert ours.eos == ours.size - 1 == 512 + 90 + 1


def test_every_byte_has_a_token(ours: Tokenizer) -> None:
    """With 256 bytes in both forms nothing is unknown: no end-of-text token appears by itself."""
    assert len(ours.core.get_vocab()) == 512 + 90 + 2
    for text in TEXTS:
        if "<|" not in text:
            assert ours.eos not in ours.ids(text)


@pytest.mark.parametrize("cls", [CLIPTokenizer, CLIPTokenizerFast])
def test_equals_transformers_on_a_saved_folder(cls: Any, folder: Path, ours: Tokenizer) -> None:
    theirs = cls.from_pretrained(folder)
    assert theirs.model_max_length == 77
    assert_equal(ours, theirs)
    assert_equal(Tokenizer.load(folder), theirs)


@given(st.text(max_size=60))
def test_equals_transformers_on_any_text(text: str) -> None:
    ours, theirs = both()
    assert ours.ids(text) == theirs(text, add_special_tokens=False).input_ids


PAIR: list[Any] = []


def both() -> tuple[Tokenizer, Any]:
    if not PAIR:
        mine = Tokenizer.from_merges(merges())
        vocab = mine.core.get_vocab()
        PAIR.append((mine, CLIPTokenizer(vocab=vocab, merges=merges(), model_max_length=77)))
    return PAIR[0]


def old(text: str, **more: Any) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    return {"content": text, **flags, **more}


def test_layout_of_stable_diffusion_1(folder: Path, tmp_path: Path) -> None:
    """Typed tokens in tokenizer_config.json, plain ones for padding, and a special_tokens_map.json."""
    named = {"bos_token": BOS, "eos_token": EOS, "unk_token": EOS}
    config = {key: old(text, __type="AddedToken") for key, text in named.items()}
    files = {
        "tokenizer_config": {**config, "pad_token": EOS, "model_max_length": 77, "tokenizer_class": "CLIPTokenizer"},
        "special_tokens_map": {**{key: old(text) for key, text in named.items()}, "pad_token": EOS},
    }
    path = layout(tmp_path, folder, **files)
    assert_equal(Tokenizer.load(path), CLIPTokenizer.from_pretrained(path))


def test_layout_of_stable_diffusion_2_pads_with_the_exclamation_mark(folder: Path, tmp_path: Path) -> None:
    """The map overrules tokenizer_config.json; then `!` in a prompt is the padding token too, as in transformers."""
    config = {"bos_token": BOS, "eos_token": old(EOS, __type="AddedToken"), "pad_token": EOS, "model_max_length": 77}
    path = layout(tmp_path, folder, tokenizer_config=config, special_tokens_map={"pad_token": "!"})
    ours = Tokenizer.load(path)
    assert ours.pad == 0
    assert ours.encode("a cat")[-1] == 0
    assert_equal(ours, CLIPTokenizer.from_pretrained(path), [*TEXTS, "wow!!! a cat!"])


def test_layout_of_sdxl_lists_added_tokens(folder: Path, tmp_path: Path) -> None:
    size = Tokenizer.load(folder).size
    decoder = {
        "0": old("!", normalized=False, special=True),
        str(size - 2): old(BOS, normalized=False, special=True),
        str(size - 1): old(EOS, special=True),
        str(size): old("<New>", special=False),
    }
    config = {"added_tokens_decoder": decoder, "bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": "!"}
    path = layout(
        tmp_path, folder, tokenizer_config=config | {"model_max_length": 77, "tokenizer_class": "CLIPTokenizer"}
    )
    assert_equal(Tokenizer.load(path), CLIPTokenizer.from_pretrained(path), [*TEXTS, "a <new> <NEW>cat!"])


def test_layout_with_added_tokens_json(folder: Path, tmp_path: Path) -> None:
    size = Tokenizer.load(folder).size
    path = layout(tmp_path, folder, added_tokens={"<cat-toy>": size}, tokenizer_config={"model_max_length": 77})
    ours = Tokenizer.load(path)
    assert_equal(ours, CLIPTokenizer.from_pretrained(path), [*TEXTS, "a <cat-toy> on a chair"])
    assert size in ours.ids("a <cat-toy>")


def test_layout_of_a_bare_vocabulary(folder: Path, tmp_path: Path) -> None:
    path = layout(tmp_path, folder)
    ours = Tokenizer.load(path)
    assert ours.length == 77
    theirs = CLIPTokenizer.from_pretrained(path)
    for text in TEXTS:
        assert ours.ids(text) == theirs(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("pad", [EOS, "!"])
def test_what_transformers_saves_loads(folder: Path, tmp_path: Path, pad: str) -> None:
    """transformers 5 writes tokenizer.json and tokenizer_config.json alone."""
    theirs = CLIPTokenizer.from_pretrained(folder, pad_token=pad)
    theirs.add_tokens(["<s0>", "<s0>_1"])
    theirs.save_pretrained(tmp_path)
    assert_equal(Tokenizer.load(tmp_path), CLIPTokenizer.from_pretrained(tmp_path))
    # At the ids, not the words, of diffusers: one name brings all its vectors.
    assert Tokenizer.load(tmp_path).ids("<s0>") == theirs("<s0> <s0>_1", add_special_tokens=False).input_ids


def test_save_is_a_round_trip(ours: Tokenizer, tmp_path: Path) -> None:
    grown = ours.add("<Toy>", 3).add("style")
    grown.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    theirs = CLIPTokenizer.from_pretrained(tmp_path)
    assert again.vectors == grown.vectors
    for text in [*TEXTS, "a <Toy> in the style of <toy>_1"]:
        assert again.ids(text) == grown.ids(text)
    for text in TEXTS:
        assert again.ids(text) == theirs(text, add_special_tokens=False).input_ids


def test_add_gives_a_new_tokenizer(ours: Tokenizer) -> None:
    before = ours.ids("a <toy> cat")
    grown = ours.add("<toy>", 3)
    size = ours.size
    assert grown.ids("a <toy> cat") == [*ours.ids("a"), size, size + 1, size + 2, *ours.ids("cat")]
    assert grown.words("a <toy> cat")[1] == (size, size + 1, size + 2)  # one word, so that no chunk splits it
    assert ours.ids("a <toy> cat") == before
    assert grown.size == size + 3


@pytest.mark.parametrize("name", ["<toy>", "<TOY>", "<toy>_1", "<toy>_3", EOS, "cat</w>", "", " x"])
def test_names_that_would_be_ambiguous_are_refused(ours: Tokenizer, name: str) -> None:
    grown = ours.add("<toy>", 3)
    with pytest.raises(PellucidError, match="name of a new token"):
        grown.add(name)


def test_words_are_not_split(ours: Tokenizer) -> None:
    words = ours.words("unbelievably 42 cats!")
    assert [len(word) > 0 for word in words] == [True] * 5  # unbelievably, 4, 2, cats, !
    assert [i for word in words for i in word] == ours.ids("unbelievably 42 cats!")


def test_tokens_are_readable(ours: Tokenizer) -> None:
    grown = ours.add("<toy>")
    assert [grown.token(i) for i in grown.encode("a cat <toy>")[:5]] == [BOS, "a", "cat", "<toy>", EOS]
    with pytest.raises(PellucidError, match="token id"):
        ours.token(10**6)


def test_too_long_a_text_is_an_error_not_cut(ours: Tokenizer) -> None:
    assert len(ours.encode("cat " * 75)) == 77
    with pytest.raises(PellucidError, match="at most 75; got 76") as caught:
        ours.encode("cat " * 76)
    assert caught.value.code == "prompt-length"


def test_a_tokenizer_of_its_own_is_taken_as_it_stands(tmp_path: Path) -> None:
    """A BPE with other rules: words by space, upper case kept, truncation set in the file."""
    core = tokenizers.Tokenizer(models.BPE(unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["?", "<s>", "</s>"], show_progress=False)
    core.train_from_iterator([*CORPUS, "Cat Dog"], trainer)
    core.enable_truncation(4)
    core.enable_padding(length=9)
    core.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 20}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    ours = Tokenizer.load(tmp_path)
    core.no_truncation()
    core.no_padding()
    text = "a Cat and a Dog on the red chair"
    assert ours.ids(text) == core.encode(text, add_special_tokens=False).ids
    assert len(ours.ids(text)) > 4
    assert (ours.bos, ours.eos, ours.pad, ours.length) == (1, 2, 2, 20)
    ours.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").ids(text) == ours.ids(text)


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "vocab.json and merges.txt, or tokenizer.json"),
        ({"vocab__json": "{", "merges__txt": ""}, r"vocab\.json must be JSON"),
        ({"vocab__json": '{"a": 0}', "merges__txt": "#version: 0.2\nb c\n"}, "belong together"),
        ({"tokenizer__json": "[]"}, "JSON object"),
        ({"tokenizer__json": '{"model": 3}'}, "must be a tokenizer"),
        ({"tokenizer_config__json": '{"added_tokens_decoder": {"x": 1}}'}, "as transformers writes them"),
        ({"tokenizer_config__json": '{"added_tokens_decoder": {"1": {}}}'}, "as transformers writes them"),
        ({"tokenizer_config__json": '{"tokenizer_class": "CLIPTokenizer"}'}, r"vocab\.json of .* a file that exists"),
        ({"tokenizer_config__json": "no"}, "tokenizer_config.json must be JSON"),
        ({"vocab__json": '{"a": 0}', "merges__txt": "", "added_tokens__json": '{"<x>": 99}'}, "99, the next free one"),
    ],
)
def test_broken_folders_give_one_line(tmp_path: Path, files: dict[str, str], words: str) -> None:
    with pytest.raises(PellucidError, match=words) as caught:
        Tokenizer.load(write(tmp_path, **files))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [None, 3, b"cat", ["a"], "\ud83d"])
def test_what_is_not_text_is_refused(ours: Tokenizer, bad: Any) -> None:
    with pytest.raises(PellucidError, match="prompt must be text"):
        ours.ids(bad)


def test_the_pattern_splits_as_openai_wrote_it() -> None:
    split = pre_tokenizers.Split(tokenizers.Regex(PIECES), behavior="removed", invert=True)
    assert [piece for piece, _ in split.pre_tokenize_str("it's 42 cats!!")] == ["it", "'s", "4", "2", "cats", "!!"]
