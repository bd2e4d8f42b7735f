"""CLIP's tokenizer, from the files that checkpoints carry, over the `tokenizers` package."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import read_text, typed
from pellucid.interop import weights

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
WORD_END = "</w>"
LENGTH = 77
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Contractions, then runs of letters, single digits, runs of anything else: OpenAI's pattern.
PIECES = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back. `length` counts the ids of one window of the encoder, BOS and EOS among them."""

    core: tokenizers.Tokenizer = field(repr=False)
    bos: int
    eos: int
    pad: int
    length: int = LENGTH
    clip: bool = True  # CLIP's rules around the vocabulary; else those of a tokenizer.json

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """From vocab.json and merges.txt, or tokenizer.json, with what the files beside them say of special tokens."""
        folder = Path(folder)
        try:
            return cls._load(folder)
        except PellucidError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:  # JSON of another shape
            must = f"files of the tokenizer in {folder.name} must be as transformers writes them"
            raise PellucidError(f"{must}; got: {str(error)[:120]}.", "tokenizer-files") from None

    @classmethod
    def _load(cls, folder: Path) -> Tokenizer:
        config = _read_json(folder / "tokenizer_config.json") or {}
        named, added = _special_tokens(folder, config)
        kind = config.get("tokenizer_class")
        files = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
        clip = kind.startswith("CLIPTokenizer") if isinstance(kind, str) else files
        if clip:
            named = _in_order({"bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": EOS, **named})
            core = clip_core(*_vocabulary(folder), str(_content(named["unk_token"])))
        else:
            core = _whole_core(folder)
        _add_special(core, named, added, folder)
        return cls(core, **_ids_of(core, named, folder), length=_window_length(config), clip=clip)

    @classmethod
    def from_merges(cls, merges: Sequence[tuple[str, str]], *, length: int = LENGTH) -> Tokenizer:
        """CLIP's own layout of a vocabulary: 256 bytes, the 256 that end a word, the merges, BOS, EOS."""
        alphabet = byte_letters()
        entries = [*alphabet, *(letter + WORD_END for letter in alphabet), *(a + b for a, b in merges), BOS, EOS]
        words = dict.fromkeys(entries)  # two merges may make the same word
        core = clip_core({word: i for i, word in enumerate(words)}, merges, EOS)
        core.add_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
        return cls(core, bos=len(words) - 2, eos=len(words) - 1, pad=len(words) - 1, length=length)

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return max(self.core.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def room(self) -> int:
        """Tokens of text that fit into one window."""
        return self.length - 2

    @cached_property
    def vectors(self) -> dict[int, tuple[int, ...]]:
        """The ids that an added token stands for: `name` brings `name_1`, `name_2`, … where they were added too."""
        added = {token.content: i for i, token in self.core.get_added_tokens_decoder().items() if not token.special}
        table = {}
        for name, first in added.items():
            ids = [first]
            while (more := added.get(f"{name}_{len(ids)}")) is not None:
                ids.append(more)
            table[first] = tuple(ids)
        return table

    def words(self, text: str) -> list[tuple[int, ...]]:
        """The ids of each word of the text. A word is what the BPE sees at once, or one added token."""
        if not isinstance(text, str):
            raise PellucidError(rule("prompt", "text", text), "prompt")
        try:
            coded = self.core.encode(text, add_special_tokens=False)
        except UnicodeEncodeError:  # a lone surrogate, which no UTF-8 file can hold
            raise PellucidError("prompt must be text that UTF-8 can hold; got half a character.", "prompt") from None
        except Exception as error:  # a whole tokenizer.json may lack both bytes and an unknown token
            raise PellucidError(f"prompt must be text that the tokenizer knows; got: {error}.", "prompt") from None
        pairs = zip(coded.word_ids, coded.ids, strict=True)
        words = [[i for _, i in group] for _, group in groupby(pairs, key=lambda pair: pair[0])]
        return [tuple(j for i in word for j in self.vectors.get(i, (i,))) for word in words]

    def ids(self, text: str) -> list[int]:
        """All ids of the text, neither BOS nor EOS around them."""
        return [i for word in self.words(text) for i in word]

    def window(self, ids: Sequence[int]) -> list[int]:
        """One window of the encoder: BOS, the ids, EOS, padding."""
        if len(ids) > self.room:
            advice = "Longer prompts are encoded in several windows by pellucid.pipeline.encoders.text."
            raise PellucidError(rule("tokens of one window", f"at most {self.room}", len(ids), advice), "prompt-length")
        return [self.bos, *ids, self.eos, *[self.pad] * (self.room - len(ids))]

    def encode(self, text: str) -> list[int]:
        """`length` ids. A text that does not fit is an error: nothing is cut off."""
        return self.window(self.ids(text))

    def token(self, index: int) -> str:
        """What an id stands for, in readable letters; a part of a character shows as �."""
        name = self.core.id_to_token(index)
        if name is None:
            raise PellucidError(rule("token id", f"below {self.size}", index), "token-id")
        if index in self.core.get_added_tokens_decoder() or self.core.decoder is None:
            return name
        return self.core.decoder.decode([name.removesuffix(WORD_END)])

    def add(self, name: str, count: int = 1) -> Tokenizer:
        """A tokenizer that also knows `name`, which stands for `count` tokens; this one stays as it is."""
        if not name or name != name.strip():
            raise PellucidError(rule("name of a new token", "a word without spaces around it", name), "token-name")
        names = [name, *(f"{name}_{i}" for i in range(1, count))]
        for one in {*names, f"{name}_1"}:
            if self.core.token_to_id(one) is not None:
                raise _taken(name, f"{one!r} is a token already")
        stem, _, number = name.rpartition("_")
        for one in (name, stem) if stem and number.isdigit() else (name,):
            ids = self.ids(one)
            if ids and ids[0] in self.vectors and tuple(ids) == self.vectors[ids[0]]:
                raise _taken(name, f"{one!r} is an added token already")
        core = tokenizers.Tokenizer.from_str(self.core.to_str())
        core.add_tokens(names)
        grown = replace(self, core=core)
        if grown.ids(name) != [core.token_to_id(one) for one in names]:
            raise _taken(name, "another token is a part of it")
        return grown

    def save(self, folder: str | Path) -> None:
        """The layout of a checkpoint's tokenizer folder, which transformers opens."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.clip:
            self.core.model.save(str(folder))
        else:
            self.core.save(str(folder / "tokenizer.json"))
        named = {"bos_token": self.bos, "eos_token": self.eos, "pad_token": self.pad}
        names = {key: self.core.id_to_token(i) for key, i in named.items()}
        unknown = getattr(self.core.model, "unk_token", None)
        names |= {} if unknown is None else {"unk_token": unknown}
        added = sorted(self.core.get_added_tokens_decoder().items())
        config = {
            "tokenizer_class": "CLIPTokenizer" if self.clip else "PreTrainedTokenizerFast",
            "model_max_length": self.length,
            **names,
            "added_tokens_decoder": {
                str(i): {"content": t.content, **{f: getattr(t, f) for f in _FLAGS}} for i, t in added
            },
        }
        for file, value in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
            (folder / file).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _taken(name: str, why: str) -> PellucidError:
    advice = "Give the embedding another name."
    return PellucidError(rule("name of a new token", f"new ({why})", name, advice), "token-known")


def byte_letters() -> list[str]:
    """A printable letter for each byte, in the order of CLIP's vocabulary: its id 0 is the exclamation mark."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(b) for b in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]


def clip_core(vocab: Mapping[str, int], merges: Iterable[tuple[str, str]], unknown: str) -> tokenizers.Tokenizer:
    """Byte-level BPE in lower case, whose words end in </w>."""
    try:
        model = models.BPE(vocab=dict(vocab), merges=list(merges), end_of_word_suffix=WORD_END, unk_token=unknown)
    except Exception as error:  # the package raises bare Exceptions
        raise PellucidError(f"vocabulary and merges must belong together; got: {error}.", "tokenizer-files") from None
    core = tokenizers.Tokenizer(model)
    core.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    split = pre_tokenizers.Split(Regex(PIECES), behavior="removed", invert=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    return core


def _whole_core(folder: Path) -> tokenizers.Tokenizer:
    """A tokenizer.json as it stands, less the truncation and padding that it may carry."""
    file = folder / "tokenizer.json"
    held = _read_json(file)
    if held is None:
        must = "a folder with vocab.json and merges.txt, or tokenizer.json"
        raise PellucidError(rule("tokenizer", must, folder.name), "tokenizer-files")
    model, added = held.get("model"), held.get("added_tokens")
    if isinstance(model, dict) and isinstance(model.get("vocab"), dict):
        _check_ids(model["vocab"], len(added) if isinstance(added, list) else 0, file.name)
    try:
        core = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise PellucidError(f"tokenizer.json must be a tokenizer; got: {error}.", "tokenizer-files") from None
    core.no_truncation()
    core.no_padding()
    return core


def _vocabulary(folder: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Entries and merges, of tokenizer.json where there is one: transformers prefers it too."""
    whole = _read_json(folder / "tokenizer.json")
    if whole is not None:
        model = whole.get("model") or {}
        if not isinstance(model.get("vocab"), dict) or not isinstance(model.get("merges"), list):
            raise PellucidError(rule("model of tokenizer.json", "a BPE", model.get("type")), "tokenizer-files")
        _check_ids(model["vocab"], 0, "tokenizer.json")
        return model["vocab"], [_pair_of(merge, "tokenizer.json") for merge in model["merges"]]
    for name in ("vocab.json", "merges.txt"):
        if not (folder / name).is_file():
            raise PellucidError(rule(f"{name} of {folder.name}", "a file that exists", "none"), "tokenizer-files")
    entries = _read_json(folder / "vocab.json") or {}
    _check_ids(entries, 0, "vocab.json")
    lines = read_text(folder / "merges.txt", "merges.txt", code="tokenizer-files").replace("\r\n", "\n").split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    return entries, [_pair_of(line, "merges.txt") for line in lines if not line.startswith("#version")]


def _check_ids(vocab: Mapping[str, Any], more: int, where: str) -> None:
    """Refuses ids beyond the size of a vocabulary: the package would make room up to the highest."""
    room = len(vocab) + more
    for word, i in vocab.items():
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < room:
            must = f"a whole number below {room}, the size of the vocabulary"
            raise PellucidError(rule(f"id of {word[:40]!r} in {where}", must, i), "tokenizer-files")


def _pair_of(merge: Any, where: str) -> tuple[str, str]:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
        raise PellucidError(rule(f"a merge of {where}", "two parts of a word", merge), "tokenizer-files")
    return parts[0], parts[1]


def _read_json(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        return weights.read_json(file)
    except PellucidError as error:
        raise PellucidError(str(error), "tokenizer-files") from None


def _content(token: str | AddedToken) -> str:
    return token if isinstance(token, str) else token.content


def _as_token(value: Any, *, special: bool) -> Any:
    """A token as the files write it: its text, which stays a str, or an object with flags."""
    if not isinstance(value, dict):
        return str(value)
    flags = {
        flag: typed(bool, value[flag], f"{flag} of an added token", code="tokenizer")
        for flag in _FLAGS
        if flag in value
    }
    return AddedToken(value["content"], **{**flags, "special": special or flags.get("special", False)})


def _special_tokens(
    folder: Path, config: Mapping[str, Any]
) -> tuple[dict[str, str | AddedToken], list[tuple[int, AddedToken]]]:
    """The named tokens, and those added to the vocabulary, by id.

    tokenizer_config.json says all since transformers 4.34 (added_tokens_decoder); before that
    special_tokens_map.json overrules it and added_tokens.json lists the rest.
    """
    given = {key: config[key] for key in _NAMED if config.get(key) is not None}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    stated = config.get("added_tokens_decoder")
    added = [(int(i), _as_token(token, special=False)) for i, token in (stated or {}).items()]
    if stated is None:
        legacy = _read_json(folder / "special_tokens_map.json") or {}
        given |= {key: legacy[key] for key in _NAMED if legacy.get(key) is not None}
        extra = legacy.get("additional_special_tokens") or extra
        names = {value["content"] if isinstance(value, dict) else value for value in given.values()}
        for text, i in (_read_json(folder / "added_tokens.json") or {}).items():
            special = text in names
            added.append((i, AddedToken(text, normalized=not special, special=special)))
        for token in (_read_json(folder / "tokenizer.json") or {}).get("added_tokens", []):
            added.append((token["id"], _as_token(token, special=False)))
    named = {key: _as_token(token, special=True) for key, token in given.items()}
    named |= {f"extra {n}": _as_token(token, special=True) for n, token in enumerate(extra)}
    return _in_order(named), sorted(added, key=lambda pair: pair[0])


def _in_order(named: Mapping[str, Any]) -> dict[str, Any]:
    """In the order in which transformers adds them: it decides the ids of those that are new."""
    return {key: named[key] for key in (*_NAMED, *(key for key in named if key not in _NAMED)) if key in named}


def _add_special(
    core: tokenizers.Tokenizer,
    named: Mapping[str, str | AddedToken],
    added: Sequence[tuple[int, AddedToken]],
    folder: Path,
) -> None:
    """Tell the core which tokens are never split; a flag stated twice counts as it was stated last."""
    known = {token.content for _, token in added}
    names = {_content(token) for token in named.values()}
    tokens = [token for _, token in added]
    for token in tokens:
        token.special = token.special or token.content in names
    for named_token in named.values():
        if _content(named_token) not in known:
            flagged = AddedToken(named_token, special=True) if isinstance(named_token, str) else named_token
            tokens.append(flagged)
    core.add_tokens(tokens)
    for i, token in added:
        if core.token_to_id(token.content) != i:
            got = f"{core.token_to_id(token.content)} for {token.content!r}"
            raise PellucidError(
                rule(f"id of an added token in {folder.name}", f"{i}, the next free one", got), "tokenizer-files"
            )


def _ids_of(core: tokenizers.Tokenizer, named: Mapping[str, str | AddedToken], folder: Path) -> dict[str, int]:
    ids = {}
    for key in ("bos", "eos", "pad"):
        token = named.get(f"{key}_token", named.get("eos_token") if key == "pad" else None)
        index = None if token is None else core.token_to_id(_content(token))
        if index is None:
            must = f"named in tokenizer_config.json or special_tokens_map.json of {folder.name}"
            raise PellucidError(
                rule(f"{key}_token", must, None if token is None else _content(token)), "tokenizer-special"
            )
        ids[key] = index
    return ids


def _window_length(config: Mapping[str, Any]) -> int:
    """`model_max_length`; transformers writes 10³⁰ where it is unknown."""
    length = config.get("model_max_length")
    if isinstance(length, bool) or not isinstance(length, int | float) or length > 10**6:
        return LENGTH
    if length < 3:
        raise PellucidError(rule("model_max_length", "at least 3", length), "tokenizer-files")
    return int(length)
