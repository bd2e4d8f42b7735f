"""`pellucid.load`: a folder, a single file, a hub id or a bundle → a pipeline; and back to a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import nn

from pellucid.core.errors import PellucidError, nearest, rule
from pellucid.interop import source
from pellucid.interop.components import Components
from pellucid.interop.family import check_fit
from pellucid.interop.weights import DTYPES
from pellucid.models import quantize
from pellucid.models.tiny_vae import TinyAutoencoder
from pellucid.models.vae import AutoencoderKL
from pellucid.pipeline.cpu_speed import measure
from pellucid.pipeline.encoders.text import add_inversions, read_inversion
from pellucid.pipeline.model import lay_out, networks_of
from pellucid.pipeline.peer_words import LOAD, option_error
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.policy import Policy

PathLike = str | os.PathLike[str]
STORED = "stored"  # a dtype: that of the files, on a CPU too
AUTO = "auto"  # a dtype: on a CPU the faster one, measured; elsewhere that of the files


def load(
    where: PathLike,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    variant: str | None = None,
    revision: str | None = None,
    target: str | None = None,
    tokenizer: PathLike | None = None,
    vae: PathLike | None = None,
    image_encoder: PathLike | None = None,
    inversions: Sequence[PathLike] = (),
    policy: Policy | None = None,
    **unknown: Any,
) -> Pipeline:
    """A pipeline from a diffusers folder, a single-file checkpoint, a hub id or the name of a bundle.

    `vae` and `image_encoder` are folders or files of other ones to use; of a whole CLIP it is the vision half.
    `inversions` are textual inversion files, whose names then work in prompts. Weights keep the dtype of their files,
    except float16 on a CPU, where it is slow: float32 there, unless `dtype` is "stored". With "fp8" the large linear
    layers of the denoising network are in e4m3 and the rest of the model is in bfloat16: see `models.quantize`. With
    "auto" a CPU takes bfloat16, and the channels innermost, where a short measurement finds them faster. What the files
    contradict is in `pipe.components.notes`.
    """
    for name, value in unknown.items():
        raise option_error(name, value, signature(load).parameters, LOAD)
    if not isinstance(where, str | os.PathLike):
        raise PellucidError(rule("model", "a folder, a file, a hub id or the name of a bundle", where), "not-found")
    policy = Policy() if policy is None else policy
    if not isinstance(policy, Policy):
        raise PellucidError(rule("policy", "a Policy", type(policy).__name__), "policy")
    known = (*DTYPES, quantize.FP8, AUTO, STORED)
    if isinstance(dtype, str) and dtype not in known:
        raise PellucidError(rule("dtype", f"one of {', '.join(known)}", dtype, nearest(dtype, known)), "dtype")
    goal = source.place(device) or default_device()
    policy.check(goal)
    early = None if policy.offload != "none" else goal
    if dtype == AUTO:
        dtype, policy = _measured(goal, policy)
    named = quantize.REST if dtype == quantize.FP8 else dtype
    kind: dict[str, Any] = {"dtype": None if named == STORED else named, "device": early}
    parts = source.read_components(
        where, **kind, variant=variant, revision=revision, target=target, tokenizer=tokenizer
    )
    if vae is not None:
        parts = replace(parts, vae=_component(vae, (AutoencoderKL, TinyAutoencoder), "vae", kind))
        check_fit(parts.network, parts.vae, parts.text_encoders)
    if image_encoder is not None:
        parts = replace(parts, image_encoder=source.load_image_encoder(image_encoder, **kind))
    if inversions:
        encoders, tokenizers = add_inversions(
            parts.text_encoders, parts.tokenizers, [read_inversion(os.fspath(path)) for path in inversions]
        )
        parts = replace(parts, text_encoders=tuple(encoders), tokenizers=tuple(tokenizers))
    for network in networks_of(parts):
        network.eval().requires_grad_(False)
    if dtype is None and goal.type == "cpu":
        widen(parts)
    if dtype == quantize.FP8:
        parts = replace(parts, notes=(*parts.notes, *_in_fp8(parts, goal)))
    if parts.vae is not None and _leaves_float16(parts.vae):
        parts.vae.float()
        parts = replace(parts, notes=(*parts.notes, "the VAE works in float32: its config says force_upcast"))
    if goal.type == "cpu" and any(_dtype_of(network) == torch.float16 for network in networks_of(parts)):
        parts = replace(parts, notes=(*parts.notes, _SLOW_HALF.format(measure().dtype).replace("torch.", "")))
    lay_out(parts, policy, goal)
    return Pipeline(parts, policy, goal)


_SLOW_HALF = "float16 is slow on a CPU, many times slower than {0}: use --dtype {0}, or auto, which measures"


def _dtype_of(network: nn.Module) -> torch.dtype:
    return next(network.parameters()).dtype


def _measured(device: torch.device, policy: Policy) -> tuple[torch.dtype | None, Policy]:
    """The dtype that a device is fast in, and the policy, with the channels innermost where a CPU gains by that.

    Both are in the recipe, which repeats the image on any machine.
    """
    if device.type != "cpu":
        return None, policy
    speed = measure()
    last = speed.dtype == torch.bfloat16 and speed.prefers_channels_last and "channels_last" not in policy.without
    return speed.dtype, replace(policy, channels_last=True) if last else policy


def widen(parts: Components) -> None:
    """Float16 to float32: a CPU takes some thirty times as long in float16."""
    for network in networks_of(parts):
        if _dtype_of(network) == torch.float16:
            network.float()


def _in_fp8(parts: Components, device: torch.device) -> list[str]:
    """Rounds the large linear layers of the denoising network; notes on how slow that is on the device."""
    if not quantize.quantize(parts.network):
        must = f"another one for {parts.name}: fp8 is for linear layers of {quantize.LEAST} features or more"
        raise PellucidError(rule("dtype", must, quantize.FP8, "Use dtype='bfloat16'."), "dtype")
    if quantize.native(device):
        return []
    return [f"fp8 is emulated on this device ({device.type}), which is slow: NVIDIA GPUs from capability 8.9 have it"]


def _leaves_float16(vae: Any) -> bool:
    """Whether a VAE's activations leave the range of the float16 that it is in; SDXL's do."""
    return bool(getattr(vae.config, "force_upcast", False)) and _dtype_of(vae) == torch.float16


def _component(path: PathLike, kinds: Any, name: str, kind: dict[str, Any]) -> Any:
    found = source.load_component(path, **kind)
    if not isinstance(found, kinds):
        raise PellucidError(rule(name, "a folder or file of one", type(found).__name__), "component-kind")
    return found


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
