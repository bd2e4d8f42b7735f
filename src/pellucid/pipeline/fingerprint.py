"""Fingerprints: short names for weights, the same for the same numbers wherever they lie and however they were saved.

They are read from the loaded tensors, so a folder, its shards and a single file of one model agree; another dtype is
another fingerprint. Networks up to 64 MiB are hashed whole. Of larger ones, every tensor's name, shape and dtype
count, small tensors whole, and of each large tensor 16 runs of 64 numbers spread over it: retraining changes them all,
7 GB take a fraction of a second, and a single number changed by hand in a large network may go unseen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pellucid.core import schedule as schedules
from pellucid.interop.components import Components
from pellucid.models.lora import AdapterSet

_SCHEME = "weights-1"
PARTS = ("network", "vae", "text encoders", "tokenizers", "schedule, target or settings")
_DIGITS = 16  # hex digits a part: chance meets another in one of 2⁶⁴
WHOLE = 64 * 2**20  # bytes of tensors that are hashed whole
_SMALL = 4096  # numbers of a tensor that is hashed whole in a larger network
_RUNS, _RUN = 16, 64

# Network → (which tensors in which version, fingerprint): a LoRA merged in place is another version.
_known: WeakKeyDictionary[nn.Module, tuple[int, str]] = WeakKeyDictionary()


def of_model(components: Components) -> str:
    """The fingerprint of what makes pixels from words: `weights-1:` and one hash for each of `PARTS`."""
    words = [tokenizer.core.to_str() for tokenizer in components.tokenizers]
    process = {"schedule": schedules.to_dict(components.schedule), "target": components.target}
    parts = (
        of_network(components.network),
        of_network(components.vae) if components.vae is not None else "",
        "".join(of_network(encoder) for encoder in components.text_encoders),
        "".join(words),
        json.dumps({**process, "extra": components.extra}, sort_keys=True, default=str),
    )
    return f"{_SCHEME}:" + "-".join(short_hash(part) for part in parts)


def differing(a: str, b: str) -> tuple[str, ...]:
    """The parts in which two fingerprints of models differ; all of them where they cannot be compared."""
    (kind, _, ours), (other_kind, _, theirs) = a.partition(":"), b.partition(":")
    pairs = list(zip(ours.split("-"), theirs.split("-"), strict=False))
    if kind != other_kind or len(pairs) != len(PARTS):
        return PARTS if a != b else ()
    return tuple(name for name, (mine, other) in zip(PARTS, pairs, strict=True) if mine != other)


def of_network(network: nn.Module) -> str:
    """The fingerprint of one network's weights, computed once as long as nobody changes them."""
    now = hash(tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in network.parameters()))
    known = _known.get(network)
    if known is None or known[0] != now:
        known = _known[network] = (now, of_tensors(network.state_dict()))
    return known[1]


def of_adapter(adapters: AdapterSet) -> str:
    """The fingerprint of a LoRA file, of whatever layout, by what it does to which layer."""
    found = {f"{layer}.{name}": value for layer, d in adapters.layers.items() for name, value in _tensors_inside(d)}
    found |= {f"{word}{name}": value for word, held in adapters.tokens.items() for name, value in _tensors_inside(held)}
    return of_tensors(found)


def _tensors_inside(held: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors and numbers of a weight difference, by their path."""
    if isinstance(held, Tensor):
        yield name, held
    elif is_dataclass(held):
        for one in fields(held):
            yield from _tensors_inside(getattr(held, one.name), f"{name}.{one.name}")
    elif isinstance(held, list | tuple):
        for i, one in enumerate(held):
            yield from _tensors_inside(one, f"{name}.{i}")
    elif isinstance(held, bool | int | float):
        yield name, torch.tensor(float(held), dtype=torch.float64)


def of_tensors(named: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str:
    """`weights-1:` and the hash of tensors under their names, in the order of these."""
    tensors = dict(named)
    whole = sum(t.numel() * t.element_size() for t in tensors.values()) <= WHOLE
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        found.update(json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode())
        if tensor.is_meta:  # a model without numbers, whose memory is predicted
            continue
        if not whole and tensor.numel() > _SMALL:  # by index: to flatten a channels-last tensor would copy it
            tensor = tensor[torch.unravel_index(_spread(tensor.numel(), tensor.device), tensor.shape)]
        found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{_SCHEME}:{found.hexdigest()[:_DIGITS]}"


def _spread(count: int, device: torch.device) -> Tensor:
    """The places of `_RUNS` runs of neighbours, from the first number to the last."""
    starts = torch.tensor([i * (count - _RUN) // (_RUNS - 1) for i in range(_RUNS)], device=device)
    return (starts[:, None] + torch.arange(_RUN, device=device)).reshape(-1)


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
