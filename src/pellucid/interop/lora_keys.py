"""Other people's names for the layers of a network: diffusers' new and old, PEFT's, kohya's, CompVis', and numbers.

No name is guessed from its underscores: all spellings of all layers of the network at hand are written into a table,
and a name of a file is looked up in it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import nn

from pellucid.interop.single_file_keys import indices, new_name, unet_table
from pellucid.models.lora import layer_weights

_DENOISER = "denoiser"  # stands for `unet` or `transformer`, whichever the pipeline has
_PREFIXES = {
    "base_model.model.": None,  # PEFT: the component is whichever has the layer
    "model.diffusion_model.": _DENOISER,
    "diffusion_model.": _DENOISER,
    "unet.": _DENOISER,
    "transformer.": _DENOISER,
    "text_encoder_2.": "text_encoder_2",
    "text_encoder.": "text_encoder",
    "lora_unet_": _DENOISER,
    "lora_transformer_": _DENOISER,
    "lycoris_": _DENOISER,
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
    "lora_te_": "text_encoder",
}
# How a key ends → what it holds. PEFT may put the adapter's name before the last `.weight`.
_ENDINGS = {
    "down": r"\.lora_A(?:\.[^.]+)?\.weight|\.lora_down\.weight|(?:[._]lora|\.lora_linear_layer)\.down\.weight|:down",
    "up": r"\.lora_B(?:\.[^.]+)?\.weight|\.lora_up\.weight|(?:[._]lora|\.lora_linear_layer)\.up\.weight|:up",
    "up_bias": r"\.lora_B(?:\.[^.]+)?\.bias|\.lora_linear_layer\.up\.bias",
    "mid": r"\.lora_mid\.weight",
    "alpha": r"(?:[._]lora|\.lora_linear_layer)?\.alpha",
    "magnitude": r"\.(?:lora_)?magnitude_vector(?:\.[^.]+)?(?:\.weight)?",
    "dora_scale": r"\.dora_scale",
    "diff": r"\.diff|\.w_norm",
    "diff_b": r"\.diff_b|\.b_norm",
    "own": r"\.(?P<name>hada_w[12]_[ab]|hada_t[12]|lokr_w[12](?:_[ab])?|lokr_t2)(?:\.[^.]+)?",
}
_ENDING = re.compile("(?P<stem>.+?)(?:" + "|".join(f"(?P<{part}>{end})" for part, end in _ENDINGS.items()) + ")")


class KeyParts(NamedTuple):
    """A key of a file, taken apart: the layer as the file spells it, and what of the layer it holds."""

    stem: str
    part: str


class Layer(NamedTuple):
    """A layer of a network at hand."""

    component: str
    name: str


def take_apart(key: str) -> KeyParts | None:
    """A key as stem and part, or None where its ending is not known."""
    match = _ENDING.fullmatch(key)
    if match is None:
        return None
    part = match["name"] or next(part for part in _ENDINGS if match[part] is not None)
    return KeyParts(match["stem"], part)


class Spellings:
    """All spellings of all layers of the networks at hand, by component."""

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        self.tables = {component: spellings(layer_weights(network)) for component, network in networks.items()}
        self.denoiser = next((name for name in ("unet", "transformer") if name in networks), _DENOISER)

    def find(self, stem: str, component: str | None = None) -> Layer | None:
        """The layer that a file calls `stem`; without a component in the name or given, the first that has it."""
        for prefix, owner in _PREFIXES.items():
            if stem.startswith(prefix):
                owner = self.denoiser if owner == _DENOISER else owner or component
                return self.find(stem.removeprefix(prefix), owner)
        stem = stem.replace(".processor.", ".")
        for name, table in self.tables.items():
            if name == (component or name) and stem in table:
                return Layer(name, table[stem])
        return None


def spellings(names: Collection[str]) -> dict[str, str]:
    """Every spelling of every layer name → the name. A spelling that two layers share means neither."""
    blocks = _compvis_blocks(names)
    table: dict[str, str] = {}
    shared: set[str] = set()
    for name in names:
        for spelling in {s for dotted in _dotted_spellings(name, blocks) for s in (dotted, dotted.replace(".", "_"))}:
            if table.setdefault(spelling, name) != name:
                shared.add(spelling)
    table = {spelling: name for spelling, name in table.items() if spelling not in shared}
    return table | {name: name for name in names}


def _dotted_spellings(name: str, blocks: Mapping[str, str]) -> Iterator[str]:
    """A layer's names with dots: its own, CompVis', those of old LoRA files, with `text_model.` and without."""
    same = {name, new_name(name, blocks) or name}
    for old, new in _OLD_ATTENTION.items():
        same |= {s.removesuffix(new) + old for s in same if s.endswith(new)}
    for spelling in same:
        yield spelling
        yield spelling.removeprefix("text_model.")
        yield f"text_model.{spelling.removeprefix('text_model.')}"


_OLD_ATTENTION = {  # diffusers' attention processors had names of their own, in text encoders too
    ".to_out": ".to_out.0",
    ".self_attn.to_q": ".self_attn.q_proj",
    ".self_attn.to_k": ".self_attn.k_proj",
    ".self_attn.to_v": ".self_attn.v_proj",
    ".self_attn.to_out": ".self_attn.out_proj",
}


def _compvis_blocks(names: Collection[str]) -> dict[str, str]:
    """Modules of a UNet, as far as its layers' names tell how it is built → CompVis' names of them."""
    levels, layers = indices(names, "down_blocks."), indices(names, "down_blocks.0.resnets.")
    attends = [indices(names, f"up_blocks.{level}.attentions.") > 0 for level in range(levels)]
    if not layers:
        return {}
    config = {
        "block_out_channels": range(levels),
        "layers_per_block": layers,
        "up_block_types": ["CrossAttnUpBlock2D" if yes else "UpBlock2D" for yes in attends],
    }
    return {new: old for old, new in unet_table(config).items()}


# The oldest safetensors files number their layers (`unet:0:up`): all linear layers inside modules of certain classes,
# in the order in which torch walked through the network of that time.
_NUMBERED = {
    "CrossAttention": r".*\.attn[12]\.(?:to_[qkv]|to_out\.0)",
    "Attention": r".*\.attn[12]\.(?:to_[qkv]|to_out\.0)",
    "GEGLU": r".*\.ff\.net\.0\.proj",
    "CLIPAttention": r".*\.self_attn\.(?:[qkv]|out)_proj",
}
_BLOCKS, _HEADS = ("down_blocks", "up_blocks", "mid_block"), ("to_q", "to_k", "to_v", "to_out")
_CLIP_HEADS = ("k_proj", "v_proj", "q_proj", "out_proj")
_WALKS = (("attn1", "ff", "attn2"), ("attn1", "attn2", "ff"))  # inside a transformer block: then, and later


def numbered(names: Iterable[str], classes: Iterable[str]) -> Iterator[list[str]]:
    """The layers that a numbered file may mean, in its order, given the classes that it lists."""
    pattern = "|".join(_NUMBERED[c] for c in classes if c in _NUMBERED)
    meant = [name for name in names if pattern and re.fullmatch(pattern, name)]
    for walk in _WALKS:
        ranks = {word: rank for words in (_BLOCKS, walk, _HEADS, _CLIP_HEADS) for rank, word in enumerate(words)}
        places = {name: [int(p) if p.isdigit() else ranks.get(p, 0) for p in name.split(".")] for name in meant}
        yield sorted(meant, key=places.__getitem__)
