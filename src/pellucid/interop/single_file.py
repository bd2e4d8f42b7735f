"""Single-file checkpoints of CompVis and Stability → Components: Stable Diffusion 1, 2, XL and its refiner.

The family is read from names and shapes. What weights cannot say, eps or v above all, comes from the caller, from
marks in the file or from the yaml beside it; where neither says it and the family has both, it is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken
from torch import Tensor

from pellucid.core import target as targets
from pellucid.core.errors import PellucidError, rule
from pellucid.interop import diffusers_config, hub, weights
from pellucid.interop import single_file_config as configs
from pellucid.interop import single_file_keys as keys
from pellucid.interop.components import Components, LoadOptions, build, read_config
from pellucid.interop.diffusers_export import TARGET_NAMES
from pellucid.interop.family import INPAINT_CHANNELS, REFINER, SD1, SD2_BASE, SDXL, check_fit
from pellucid.interop.tokenizer import Tokenizer
from pellucid.interop.weights import some
from pellucid.models import clip

_CLIP_REPO = "openai/clip-vit-large-patch14"
_OTHER_PAD = "!"  # what Stable Diffusion 2 and the second encoder of SDXL pad with; CLIP itself pads with its end
_SD2_LAYERS = 23  # of OpenCLIP-H's 24: Stable Diffusion 2 reads the last but one
UNET, VAE, CONTROL = "model.diffusion_model.", "first_stage_model.", "control_model."
_CLIP_1, _OPEN_CLIP_1 = "cond_stage_model.transformer.", "cond_stage_model.model."
_XL_CLIP, _XL_OPEN_CLIP, REFINER_OPEN_CLIP = (
    "conditioner.embedders.0.transformer.",
    "conditioner.embedders.1.model.",
    "conditioner.embedders.0.model.",
)
_PREFIXES = (UNET, VAE, CONTROL, _CLIP_1, _OPEN_CLIP_1, _XL_CLIP, _XL_OPEN_CLIP, REFINER_OPEN_CLIP)

# Tensors of training and of the sampler, which are no weights of a network that runs.
BOOKKEEPING = re.compile(
    r"(model_ema|first_stage_model\.(loss|model_ema)|loss)\..*"  # averages of training, the VAE's critic
    r"|betas|alphas_cumprod(_prev)?|sqrt_.*|log_one_minus_.*|posterior_.*|lvlb_weights|logvar|scale_factor|global_step"
    r"|denoiser\.(sigmas|log_sigmas)"  # the schedule as tables
    r"|.*\b(position_ids|attn_mask|logit_scale)"  # tables of CLIP, and a number of its training
    r"|(cond_stage_model|conditioner\.embedders\.0)\.(transformer\.)?text_projection(\.weight)?"  # CLIP-L's: not read
    r"|v_pred|ztsnr"  # marks
)
_OURS = "under diffusers' names: put it in a folder with its config.json"
_FOREIGN: tuple[tuple[str, str], ...] = (
    (r".*(lora_(up|down|A|B)\b|lora_unet_|hada_w1|lokr_w1).*", "a LoRA: load it onto a model with lora="),
    (r"string_to_param.*|emb_params|clip_[lg]", "a textual inversion: give it as an embedding"),
    (r".*\bjoint_blocks\..*", "Stable Diffusion 3: open it with diffusers and use pellucid.wrap"),
    (r".*\bdouble_blocks\..*", "FLUX: open it with diffusers and use pellucid.wrap"),
    (r"edm_(mean|std)", "Playground 2.5, whose EDM latents are not supported from a file: use its diffusers folder"),
    (r"edm_vpred\..*", "an EDM v network (CosXL), which is not supported from a file"),
    (r"depth_model\..*", "Stable Diffusion 2 depth, which is not supported"),
    (r".*\bmotion_modules\..*", "AnimateDiff: video is not supported"),
    (r"(.*\.)?controlnet_cond_embedding\..*", f"a ControlNet {_OURS}"),
    (r"(down_blocks|up_blocks|transformer_blocks)\..*", f"a network {_OURS}"),
    (r"(encoder|decoder)\.(down|up)_blocks\..*", f"a VAE {_OURS}"),
    (r"(text_model|vision_model)\..*", f"a CLIP encoder {_OURS}"),
)

_ALONE = (
    (r"input_hint_block\..*", "a ControlNet alone: load it with load_component"),
    (r"(encoder|decoder)\.(down|up)\..*", "a VAE alone: load it with load_component"),
)


@dataclass(frozen=True)
class Layout:
    """A family's layout in one file: its text encoders, and what its weights do not say."""

    name: str
    pipeline: str
    encoders: tuple[tuple[str, str], ...]  # (prefix, reader), in the pipeline's order
    targets: tuple[str, ...]  # what its networks predict; the first is usual
    size: int  # latent pixels per side that it was trained at
    scaling: float
    extra: dict[str, Any]

    def pipeline_class(self, *, inpaints: bool, controlled: bool) -> str:
        name = self.pipeline.removesuffix("Pipeline")
        name = name.removesuffix("Img2Img") + "Inpaint" if inpaints else name
        head = "StableDiffusionXL" if name.startswith("StableDiffusionXL") else "StableDiffusion"
        return f"{head}{'ControlNet' * controlled}{name.removeprefix(head)}Pipeline"


LAYOUTS = {
    _CLIP_1: Layout(SD1.name, "StableDiffusionPipeline", ((_CLIP_1, "clip"),), ("eps",), 64, SD1.scaling, {}),
    _OPEN_CLIP_1: Layout(
        "Stable Diffusion 2",
        "StableDiffusionPipeline",
        ((_OPEN_CLIP_1, "sd2"),),
        ("eps", "v"),
        64,
        SD2_BASE.scaling,
        {},
    ),
    _XL_OPEN_CLIP: Layout(
        SDXL.name,
        "StableDiffusionXLPipeline",
        ((_XL_CLIP, "clip"), (_XL_OPEN_CLIP, "open_clip")),
        ("eps",),
        128,
        SDXL.scaling,
        {"force_zeros_for_empty_prompt": True},
    ),
    REFINER_OPEN_CLIP: Layout(
        REFINER.name,
        "StableDiffusionXLImg2ImgPipeline",
        ((REFINER_OPEN_CLIP, "open_clip"),),
        ("eps",),
        128,
        REFINER.scaling,
        {"requires_aesthetics_score": True, "force_zeros_for_empty_prompt": False},
    ),
}


def read(path: Path, wanted: LoadOptions) -> Components:
    """The components of a whole checkpoint in one file."""
    _check_unasked(wanted)
    tensors = weights.read(path)
    sections = split(tensors, path.name)
    layout = layout_of(sections, path.name)
    target, notes = target_of(path, layout, tensors, sections, wanted.target)
    size = 96 if layout.encoders[0][0] == _OPEN_CLIP_1 and target == "v" else layout.size
    scheduler = scheduler_of(layout, target, zero_snr="ztsnr" in tensors)
    reading, words = diffusers_config.read(scheduler), _tokenizers_of(layout, path, wanted.tokenizer)
    unet = _read_unet(sections[UNET], size, wanted)
    inpaints = unet.config.in_channels == INPAINT_CHANNELS
    vae = _read_vae(sections[VAE], {"scaling_factor": layout.scaling, "sample_size": size * 8}, wanted)
    encoders = tuple(_READERS[kind](sections[prefix], wanted) for prefix, kind in layout.encoders)
    check_fit(unet, vae, encoders)
    return Components(
        name=path.name,
        pipeline_class=layout.pipeline_class(inpaints=inpaints, controlled=CONTROL in sections),
        network=unet,
        vae=vae,
        text_encoders=encoders,
        tokenizers=words,
        image_encoder=None,
        controlnets=(_read_control(sections[CONTROL], wanted),) if CONTROL in sections else (),
        scheduler=scheduler,
        schedule=reading.schedule,
        target=reading.target,
        extra=dict(layout.extra),
        notes=(*notes, *_ema_note(tensors)),
    )


def _check_unasked(wanted: LoadOptions) -> None:
    if wanted.variant is not None:
        raise PellucidError(rule("variant", "left out for a single file", wanted.variant), "variant")


def split(tensors: Mapping[str, Tensor], name: str) -> dict[str, dict[str, Tensor]]:
    """The tensors of each network, under the names that they have inside of it."""
    _refuse(tensors, name, (*_FOREIGN, *_ALONE))
    sections: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key, tensor in tensors.items():
        prefix = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), None)
        if BOOKKEEPING.fullmatch(key):
            continue
        if prefix is None:
            unknown.append(key)
        else:
            sections.setdefault(prefix, {})[key.removeprefix(prefix)] = tensor
    if unknown:
        raise PellucidError(
            f"{name} must hold a checkpoint whose names are known; unknown are {some(unknown)}.", "single-file-keys"
        )
    return sections


def _refuse(tensors: Mapping[str, Tensor], name: str, kinds: tuple[tuple[str, str], ...]) -> None:
    """Files of other kinds are named for what they are."""
    for pattern, what in kinds:
        if any(re.fullmatch(pattern, key) for key in tensors):
            raise PellucidError(
                f"{name} must be a checkpoint of Stable Diffusion 1, 2 or XL; it is {what}.", "single-file-kind"
            )


def layout_of(sections: Mapping[str, Any], name: str) -> Layout:
    found = [layout for prefix, layout in LAYOUTS.items() if prefix in sections]
    lacking = [what for prefix, what in ((UNET, "a UNet"), (VAE, "a VAE")) if prefix not in sections]
    lacking += [] if len(found) == 1 else ["a text encoder"]
    lacking += [p for layout in found for p, _ in layout.encoders if p not in sections]
    if lacking:
        held = ", ".join(prefix.rstrip(".") for prefix in sections) or "nothing that is known"
        only = " Load a ControlNet or a VAE alone with load_component." if UNET not in sections else ""
        raise PellucidError(
            f"{name} must hold a whole checkpoint; it lacks {', '.join(lacking)} and holds {held}.{only}",
            "single-file-parts",
        )
    return found[0]


# What it predicts


def target_of(
    path: Path, layout: Layout, tensors: Mapping[str, Tensor], sections: Mapping[str, Any], asked: str | None
) -> tuple[str, list[str]]:
    """The target and what is to be said of it: from the caller, a mark, the metadata, the yaml, then the family."""
    said = {
        "target=": None if asked is None else targets.named(asked),
        "the key v_pred": "v" if "v_pred" in tensors else None,
        "the file's metadata": _target_in_metadata(weights.metadata_of(path)),
        "the yaml beside it": _target_in_yaml(path.with_suffix(".yaml")),
    }
    sources = {source: found for source, found in said.items() if found is not None}
    family = layout.targets
    if sections[UNET]["input_blocks.0.0.weight"].shape[1] == INPAINT_CHANNELS:
        family = ("eps",)  # no family has an inpainting network that predicts v
    if not sources and len(family) > 1:
        raise PellucidError(
            f"target of {path.name} must be named: {layout.name} exists as {' and as '.join(family)}, and the weights "
            "do not say which. Pass target='v' (768 pixels) or target='eps' (512), or put its yaml beside it.",
            "target-unknown",
        )
    if not sources:
        return family[0], [f"nothing in the file says what it predicts; {family[0]}, as {layout.name} does, is used."]
    source, target = next(iter(sources.items()))
    differing = [f"{other} says {found}" for other, found in sources.items() if found != target]
    if target not in family:
        differing.append(f"{layout.name} predicts {family[0]}")
    notes = [f"{source} says {target}, but {', '.join(differing)}: {target} is used."] if differing else []
    return target, notes


def _target_in_metadata(metadata: Mapping[str, str]) -> str | None:
    """The keys of Stability's modelspec."""
    stated = metadata.get("modelspec.prediction_type", "").lower()
    if stated:
        return "v" if stated in ("v", "v_prediction") else "eps" if stated in ("epsilon", "eps") else None
    architecture = metadata.get("modelspec.architecture", "")
    return {"stable-diffusion-v2-768-v": "v", "stable-diffusion-v2-512": "eps"}.get(architecture.split("/")[0])


def _target_in_yaml(path: Path) -> str | None:
    """`parameterization: "v"` in the training's config; a config of these families without it means eps."""
    if not path.is_file() or path.stat().st_size > 2**20:
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    stated = re.search(r"^\s*parameterization\s*:\s*[\"']?(\w+)", text, re.MULTILINE)
    if stated is not None:
        return {"v": "v", "eps": "eps", "x0": "x0"}.get(stated[1])
    scaled = re.search(r"\b(V|Eps)Scaling\b", text)
    if scaled is not None:
        return scaled[1].lower()
    return "eps" if re.search(r"^\s*linear_start\s*:", text, re.MULTILINE) else None


def scheduler_of(layout: Layout, target: str, *, zero_snr: bool) -> dict[str, Any]:
    """The scheduler that the family's own folders have."""
    config: dict[str, Any] = {
        "num_train_timesteps": 1000,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "prediction_type": TARGET_NAMES[target],
        "steps_offset": 1,
        "timestep_spacing": "leading",
    }
    if layout.scaling == SDXL.scaling:
        config = {"_class_name": "EulerDiscreteScheduler", **config}
    elif target == "v" or zero_snr:
        config = {"_class_name": "DDIMScheduler", **config, "set_alpha_to_one": False, "clip_sample": False}
    else:
        config = {"_class_name": "PNDMScheduler", **config, "set_alpha_to_one": False, "skip_prk_steps": True}
    if zero_snr:
        config |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return config


def _ema_note(tensors: Mapping[str, Tensor]) -> list[str]:
    if any(key.startswith("model_ema.diffusion_model") for key in tensors):
        return [
            "the file also holds an average of the weights over training (model_ema); the weights themselves are used."
        ]
    return []


# Its networks


def _read_unet(tensors: Mapping[str, Tensor], size: int, wanted: LoadOptions) -> Any:
    config = configs.unet_config(tensors, size)
    found = keys.renamed(tensors, keys.unet_table(config), "UNet")
    return _built("UNet2DConditionModel", config, found, "unet", wanted)


def _read_vae(tensors: Mapping[str, Tensor], more: Mapping[str, Any], wanted: LoadOptions) -> Any:
    config = {**configs.vae_config(tensors), **more}
    return _built("AutoencoderKL", config, keys.vae_tensors(tensors, config), "vae", wanted)


def _read_control(tensors: Mapping[str, Tensor], wanted: LoadOptions) -> Any:
    config = configs.control_config(tensors)
    found = keys.renamed(tensors, keys.control_table(config), "ControlNet")
    return _built("ControlNetModel", config, found, "controlnet", wanted)


def _read_clip(tensors: Mapping[str, Tensor], wanted: LoadOptions) -> Any:
    found = clip.modern_names(tensors)
    return _built("CLIPTextModel", configs.clip_config(found), found, "text_encoder", wanted)


def _read_open_clip(tensors: Mapping[str, Tensor], wanted: LoadOptions) -> Any:
    layers = keys.indices(tensors, "transformer.resblocks.")
    config = configs.open_clip_config(tensors, layers)
    found = keys.open_clip_tensors(tensors, layers)
    return _built("CLIPTextModelWithProjection", config, found, "text_encoder_2", wanted)


def _read_sd2_clip(tensors: Mapping[str, Tensor], wanted: LoadOptions) -> Any:
    """Stable Diffusion 2 reads the last layer but one, and no projection."""
    layers = min(keys.indices(tensors, "transformer.resblocks."), _SD2_LAYERS)
    last = f"transformer.resblocks.{_SD2_LAYERS}."
    kept = {key: t for key, t in tensors.items() if key != "text_projection" and not key.startswith(last)}
    found = keys.open_clip_tensors(kept, layers)
    return _built("CLIPTextModel", configs.open_clip_config(kept, layers), found, "text_encoder", wanted)


_READERS: dict[str, Callable[[Mapping[str, Tensor], LoadOptions], Any]] = {
    "clip": _read_clip,
    "open_clip": _read_open_clip,
    "sd2": _read_sd2_clip,
}


def _built(kind: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str, wanted: LoadOptions) -> Any:
    settings = read_config(kind, config, name)
    return build(kind, settings, tensors, name=name, dtype=wanted.dtype, device=wanted.device)


def read_component(path: Path, wanted: LoadOptions, config: Mapping[str, Any] | None = None) -> Any:
    """A ControlNet or a VAE in a file of its own, or the ControlNet of a file that holds a whole checkpoint too."""
    _check_unasked(wanted)
    tensors = weights.read(path)
    _refuse(tensors, path.name, _FOREIGN)
    inner = {prefix: _below(tensors, prefix) for prefix in (CONTROL, VAE, "")}
    bare = {key: tensor for key, tensor in inner[""].items() if not BOOKKEEPING.fullmatch(key)}
    control = inner[CONTROL] or (bare if "input_hint_block.0.weight" in bare else {})
    if control:
        return _read_control(control, wanted)
    vae = inner[VAE] or (bare if "encoder.conv_in.weight" in bare else {})
    if not vae:
        raise PellucidError(
            f"{path.name} must hold a ControlNet or a VAE; got {some(sorted(tensors))}.", "not-a-component"
        )
    if "scaling_factor" not in (config or {}):
        raise PellucidError(
            f"scaling_factor of the VAE in {path.name} must be given, for its weights do not say it: "
            f"config={{'scaling_factor': {SD1.scaling}}} for Stable Diffusion 1 and 2, {SDXL.scaling} for SDXL.",
            "scaling-unknown",
        )
    kept = {key: tensor for key, tensor in vae.items() if not BOOKKEEPING.fullmatch(key)}
    return _read_vae(kept, config or {}, wanted)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


# Its tokenizers


def _tokenizers_of(layout: Layout, path: Path, given: Path | None) -> tuple[Tokenizer, ...]:
    """One a text encoder, all with CLIP's vocabulary; those of OpenCLIP pad with another token."""
    plain = _find_tokenizer(path, given)
    return tuple(plain if kind == "clip" else _padded(plain, _OTHER_PAD) for _, kind in layout.encoders)


def _find_tokenizer(path: Path, given: Path | None) -> Tokenizer:
    """A folder that was named, one beside the file, or the local copy of CLIP's repository: files hold none."""
    if given is not None:
        places = [given, given / "tokenizer"]
    else:
        repository = hub.cached(_CLIP_REPO)
        places = [path.parent / "tokenizer", path.parent, *([] if repository is None else [repository])]
    for place in places:
        if any((place / name).is_file() for name in ("vocab.json", "tokenizer.json")):
            return Tokenizer.load(place)
    raise PellucidError(
        f"tokenizer must be a folder with CLIP's vocab.json and merges.txt; got {given.name if given else None!r}. "
        "A single file contains no tokenizer: pass tokenizer= (the tokenizer folder of any Stable Diffusion 1 model), "
        f"put it next to the file as tokenizer/, or fetch {_CLIP_REPO} once.",
        "tokenizer-missing",
    )


def _padded(tokenizer: Tokenizer, pad: str) -> Tokenizer:
    """A tokenizer that pads with this token, which its texts then never split."""
    core = tokenizers.Tokenizer.from_str(tokenizer.core.to_str())
    core.add_tokens([AddedToken(pad, special=True)])
    return replace(tokenizer, core=core, pad=int(core.token_to_id(pad) or 0))
