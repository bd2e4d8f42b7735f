"""Adapter files: read in the layouts that people use, and saved in the one that diffusers opens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import parse_json
from pellucid.interop import weights
from pellucid.interop.atomic_files import writing
from pellucid.interop.lora_keys import Layer, Spellings, numbered, take_apart
from pellucid.interop.lora_parts import Config, Strength, make
from pellucid.models.lora import Adapter, AdapterSet, check_layers, layer_weights
from pellucid.models.lora_delta import Delta, DoRA, LoRA, stripped

Networks = Mapping[str, nn.Module]  # by component: `unet` or `transformer`, `text_encoder`, `text_encoder_2`
_CONFIGS = "lora_adapter_metadata"  # where diffusers keeps PEFT's configs in a safetensors file
_STEMS = ("pytorch_lora_weights", "adapter_model")  # diffusers' name in a folder, and PEFT's
_T = TypeVar("_T")


@dataclass(frozen=True)
class AdapterFile:
    """The tensors of a file, and what is said beside them."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    configs: Mapping[str, Config] = field(default_factory=dict)  # PEFT's, by component; "" is for all
    component: str | None = None  # of keys that name none


def load(path: str | Path, networks: Networks, name: str | None = None) -> AdapterSet:
    """The adapters of a file or folder, for the networks at hand.

    A folder is diffusers' or PEFT's, or has one of these for each component, in a folder of the component's name.
    """
    path = Path(path)
    name = path.stem if name is None else name
    parts = [_read(name, file, networks) for file in _open_all(path, networks)]
    adapters = {component: adapter for part in parts for component, adapter in part.adapters.items()}
    unused = tuple(key for part in parts for key in part.unused)
    tokens = {word: vectors for part in parts for word, vectors in part.tokens.items()}
    if not adapters and tokens and not unused:
        advice = "It is a textual inversion: load the model with inversions=[FILE]."
        raise PellucidError(rule(f"adapter {name}", "one with layers", "tokens alone", advice), "lora-nothing")
    if not adapters:
        got = ", ".join(unused[:3]) + (", …" if len(unused) > 3 else "")
        sdxl = "text_encoder_2" not in networks and any(k.startswith(("lora_te2_", "text_encoder_2.")) for k in unused)
        must = f"one with keys for layers of {', '.join(networks)}"
        raise PellucidError(rule(f"adapter {name}", must, got, "It is for SDXL." if sdxl else ""), "lora-nothing")
    return AdapterSet(name, adapters, unused, tokens)


def _read(name: str, file: AdapterFile, networks: Networks) -> AdapterSet:
    """The adapters in a file's tensors, in whichever layout; a key that fits no layer is listed as unused."""
    base = {component: layer_weights(network) for component, network in networks.items()}
    tokens, held = _tokens_of(name, file.tensors, file.metadata)
    stems, unused = _sorted_by_stem({key: tensor for key, tensor in file.tensors.items() if key not in held})
    spelled, numbers = Spellings(networks), _numbered_layers(name, stems, file, base)
    layers: dict[str, dict[str, Delta]] = {}
    keys: dict[str, list[str]] = {}
    for stem, parts in stems.items():
        at = numbers.get(stem) or spelled.find(stem, file.component)
        if at is None or at.name in layers.get(at.component, {}):  # a second spelling of a layer is not added to it
            unused += parts.values()
            continue
        tensors = {part: file.tensors[key] for part, key in parts.items()}
        try:
            strength = Strength(_alpha_of(tensors), config_of(file, at.component), (at.name, stem))
            made = make(tensors, strength, tuple(base[at.component][at.name].shape))
        except PellucidError as error:
            raise PellucidError(f"{at.name} of adapter {name}: {error}", error.code) from None
        used = made.used if made else set()
        keys.setdefault(at.component, []).extend(key for part, key in parts.items() if part in used)
        unused += [key for part, key in parts.items() if part not in used]
        if made:
            layers.setdefault(at.component, {})[at.name] = made.delta
    adapters = {c: Adapter(name, layers[c], tuple(keys[c])) for c in networks if c in layers}
    for component, adapter in adapters.items():
        check_layers(adapter, base[component])
    return AdapterSet(name, adapters, tuple(unused), tokens)


def _sorted_by_stem(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """The keys of a file by the layer that they name and the part they hold, and those that hold no known part."""
    stems: dict[str, dict[str, str]] = {}
    unused = []
    for key in tensors:
        found = take_apart(key)
        if found is None or found.part in stems.get(found.stem, {}):
            unused.append(key)
        else:
            stems.setdefault(found.stem, {})[found.part] = key
    return stems, unused


def _alpha_of(parts: Mapping[str, Tensor]) -> float | None:
    if "alpha" not in parts:
        return None
    if parts["alpha"].numel() != 1:
        raise PellucidError(rule("alpha", "one number", tuple(parts["alpha"].shape)), "lora-shape")
    return float(parts["alpha"])


def config_of(file: AdapterFile, component: str) -> Config:
    return file.configs.get(component, file.configs.get("", {}))


def _numbered_layers(
    name: str, stems: Mapping[str, Mapping[str, str]], file: AdapterFile, base: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Layer]:
    """`unet:0`, `unet:1`, … of the oldest files → layers. Their order is trusted only where all shapes agree."""
    found: dict[str, Layer] = {}
    for component, mine in base.items():
        wanted = [stem for stem in stems if stem.startswith(f"{component}:")]
        if not wanted:
            continue
        classes = _parsed(file.metadata.get(component, "[]"), f"metadata {component} of adapter {name}", list)
        for candidate in numbered(mine, map(str, classes)):
            layers = {f"{component}:{i}": Layer(component, layer) for i, layer in enumerate(candidate)}
            if set(layers) == set(wanted) and all(
                _fits(stems[stem], file.tensors, mine[layer.name]) for stem, layer in layers.items()
            ):
                found |= layers
                break
        else:
            must = f"the {len(wanted)} layers that the base has in the classes {classes}, with their shapes"
            raise PellucidError(rule(f"numbered adapter {name}", must, "others"), "lora-base")
    return found


def _fits(parts: Mapping[str, str], tensors: Mapping[str, Tensor], weight: Tensor) -> bool:
    if set(parts) != {"up", "down"}:
        return False
    up, down = (tensors[parts[part]] for part in ("up", "down"))
    return up.ndim > 1 and (up.shape[0], *stripped(tuple(down.shape))[1:]) == stripped(tuple(weight.shape))


def _open_all(path: Path, networks: Networks) -> Iterator[AdapterFile]:
    """The adapter files at a path."""
    if not path.is_dir():
        yield open_file(path)
        return
    parts = [component for component in networks if (path / component / "adapter_config.json").is_file()]
    for component in parts:
        yield open_folder(path / component, component)
    if not parts:
        yield open_folder(path, None)


def open_folder(folder: Path, component: str | None) -> AdapterFile:
    """One file with a known name, or else the only one that could be meant; PEFT's config and tokens beside it."""
    named = [folder / f"{stem}{end}" for stem in _STEMS for end in (".safetensors", ".bin")]
    tokens = sorted({file for pattern in _TOKEN_FILES for file in folder.glob(pattern)} - set(named))
    others = [file for file in sorted(folder.glob("*.safetensors")) if file not in tokens]
    files = [file for file in named if file.is_file()][:1] or others
    if len(files) != 1:
        got = ", ".join(file.name for file in files) or "none"
        raise PellucidError(rule(f"adapter folder {folder}", "with one .safetensors file", got), "lora-file")
    file, beside = open_file(files[0]), folder / "adapter_config.json"
    configs = {"": weights.read_json(beside)} if beside.is_file() else file.configs
    held = {key: tensor for file in tokens[:1] for key, tensor in open_file(file).tensors.items()}
    return AdapterFile({**held, **file.tensors}, file.metadata, configs, component)


def open_file(path: Path) -> AdapterFile:
    """The tensors and metadata of a safetensors file, or the tensors of a pickle that holds nothing else."""
    if not path.is_file():
        raise PellucidError(rule("adapter", "a file or folder", str(path)), "lora-file")
    # Adapters are small and may be saved over the file that they came from: they are copied out of its mapping.
    tensors = {key: tensor.clone() for key, tensor in weights.read(path).items()}
    metadata = weights.metadata_of(path)
    configs: dict[str, dict[str, Any]] = {}
    for key, value in _parsed(metadata.get(_CONFIGS, "{}"), f"{_CONFIGS} of {path.name}", dict).items():
        component, _, entry = key.partition(".")
        configs.setdefault(component, {})[entry] = value
    return AdapterFile(tensors, metadata, configs)


def _parsed(text: str, where: str, kind: type[_T]) -> _T:
    """JSON of a kind."""
    found = parse_json(text, where, "lora-config", foreign=True)
    if not isinstance(found, kind):
        raise PellucidError(rule(where, f"a JSON {kind.__name__}", found), "lora-config")
    return found


def save(adapters: AdapterSet, path: str | Path) -> None:
    """One safetensors file in diffusers' layout; alpha goes into the weights, so that no version can miss it."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise PellucidError(rule("path of an adapter", "one that ends in .safetensors", str(path)), "lora-file")
    if adapters.tokens:
        got, advice = ", ".join(adapters.tokens), "diffusers opens no file that holds both."
        raise PellucidError(rule(f"adapter {adapters.name}", "one without tokens", got, advice), "lora-save")
    tensors: dict[str, Tensor] = {}
    for component, adapter in adapters.adapters.items():
        kinds = sorted({_kind_of(delta) for delta in adapter.layers.values()})
        if kinds not in (["LoRA"], ["DoRA"]):
            name, advice = f"{component} of adapter {adapters.name}", "diffusers opens no others, and no mixture."
            raise PellucidError(rule(name, "all LoRA or all DoRA", kinds, advice), "lora-save")
        text = component.startswith("text_encoder")
        for layer, delta in adapter.layers.items():
            inside = (
                "text_model." if text and layer.startswith("encoder.") else ""
            )  # as all transformers but the newest
            tensors |= {f"{component}.{inside}{layer}.{end}": t.contiguous() for end, t in _saved(delta, text).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        save_file(tensors, path, {"format": "pt"})


def _kind_of(delta: Delta) -> str:
    """The name of a kind; a DoRA on anything but LoRA, or with norms of inputs, is a kind of its own."""
    if isinstance(delta, DoRA) and not (isinstance(delta.inner, LoRA) and delta.axis == 0):
        return f"DoRA of {'inputs' if delta.axis else type(delta.inner).__name__}"
    return type(delta).__name__


def _saved(delta: Delta, text: bool) -> dict[str, Tensor]:
    """The tensors of a layer under PEFT's endings, or under those that diffusers wants for text encoders."""
    lora = delta.inner if isinstance(delta, DoRA) else delta
    assert isinstance(lora, LoRA)
    assert lora.product.b is not None
    down, up = lora.product.b, lora.product.a
    if lora.product.core is not None:  # core·down is a down with a kernel
        down = torch.einsum("ij...,jn->in...", lora.product.core.float(), down.float().flatten(1))
    ones = (1,) * (down.ndim - 2)  # of a convolution, whose up is a 1×1 kernel
    folded = up.float() * lora.factor
    narrow = folded.to(up.dtype)
    up = narrow if torch.equal(narrow.float(), folded) else folded  # no rounding: float32 where it takes that
    up_end, down_end = ("lora_linear_layer.up", "lora_linear_layer.down") if text else ("lora_B", "lora_A")
    found = {f"{up_end}.weight": up.reshape(*up.shape, *ones), f"{down_end}.weight": down}
    if delta.bias is not None:
        found[f"{up_end}.bias"] = delta.bias
    if isinstance(delta, DoRA):
        found["lora_magnitude_vector"] = delta.magnitude.reshape(1, -1, *ones) if ones else delta.magnitude
    return found


# --- tokens: words whose vectors were trained together with the layers (pivotal tuning) ------------------------------

_EMBED = "<embed>"  # what the metadata of cloneofsimo's files say of the key of a token
_ENCODERS = {"clip_l": 0, "clip_g": 1, "text_encoders_0": 0, "text_encoders_1": 1}
_UNNAMED = "emb_params"  # a token that is named like its file
_BUNDLED = re.compile(rf"bundle_emb\.(?P<word>[^.]+)\.(?P<part>string_to_param\..+|{'|'.join(_ENCODERS)}|{_UNNAMED})")
_TOKEN = re.compile(r"<[^<>\s]+>")
_TOKEN_FILES = ("embeddings.safetensors", "*_emb.safetensors")  # beside a LoRA, of diffusers' advanced training scripts


class _Vector(NamedTuple):
    """The vectors of one word for one text encoder."""

    word: str
    encoder: int
    tensor: Tensor


def _tokens_of(
    name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[dict[str, tuple[Tensor, ...]], set[str]]:
    """The vectors (count, D) or (D,) of each word, for each text encoder in turn, and the keys that held them."""
    found: dict[str, dict[int, Tensor]] = {}
    keys: set[str] = set()
    for key, tensor in tensors.items():
        for vector in _vectors(name, key, tensor, metadata.get(key) == _EMBED):
            found.setdefault(vector.word, {}).setdefault(vector.encoder, vector.tensor)
            keys.add(key)
    return {word: tuple(by[n] for n in sorted(by)) for word, by in found.items()}, keys


def _vectors(name: str, key: str, tensor: Tensor, embed: bool) -> Iterator[_Vector]:
    """What a key holds, if it is one of a token: A1111's bundles, diffusers' and replicate's rows, cloneofsimo's."""
    bundled = _BUNDLED.fullmatch(key)
    if bundled is not None:
        yield _Vector(bundled["word"], _ENCODERS.get(bundled["part"], 0), tensor)
    elif key in _ENCODERS and tensor.ndim == 2:  # a row for each of <s0>, <s1>, …
        for n, row in enumerate(tensor):
            yield _Vector(f"<s{n}>", _ENCODERS[key], row)
    elif key == _UNNAMED:
        yield _Vector(name, 0, tensor)
    elif embed or _TOKEN.fullmatch(key):
        yield _Vector(key, 0, tensor)
