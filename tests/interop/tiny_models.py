"""Tiny random models made of diffusers' and transformers' own classes, and their weights under the original names.

Widths are multiples of 64 where a family's heads are 64 wide, of 32 where its norms have 32 groups.
"""

from __future__ import annotations

import atexit
import json
import shutil
import string
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

VOCABULARY = 64
VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": (32, 64),
    "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
SD1_UNET = {
    "sample_size": 64,
    "block_out_channels": (32, 64),
    "layers_per_block": 2,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 64,
    "attention_head_dim": 8,
}
SD2_UNET = {
    **SD1_UNET,
    "block_out_channels": (64, 128),
    "use_linear_projection": True,
    "attention_head_dim": (1, 2),
}
XL_UNET = {
    "sample_size": 128,
    "block_out_channels": (64, 64, 128),
    "layers_per_block": 2,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 3),
    "cross_attention_dim": 128,
    "attention_head_dim": (1, 1, 2),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 64 + 6 * 256,
}
REFINER_UNET = {
    **XL_UNET,
    "block_out_channels": (64, 128, 128, 128),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": 2,
    "cross_attention_dim": 64,
    "attention_head_dim": (1, 2, 2, 2),
    "projection_class_embeddings_input_dim": 64 + 5 * 256,
}
LATENT_BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def text_config(**changes: Any) -> CLIPTextConfig:
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "projection_dim": 64,
        "num_attention_heads": 1,
        "num_hidden_layers": 2,
        "max_position_embeddings": 16,
        "bos_token_id": 0,
        "eos_token_id": 63,
        "pad_token_id": 63,
    }
    return CLIPTextConfig(**{**values, **changes})


def tokenizer(folder: Path, pad: str = "<|endoftext|>") -> CLIPTokenizer:
    """CLIP's tokenizer with letters for a vocabulary, its two marks at the end as in CLIP's."""
    letters = ["!", *string.ascii_lowercase[:25]]
    words = [*letters, *(f"{c}</w>" for c in letters)]
    words += [f"<{n}>" for n in range(VOCABULARY - 2 - len(words))] + ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16, pad_token=pad)


def randomised(network: Any) -> Any:
    """Every weight is drawn: zero-initialised ones would hide a swap."""
    generator = torch.Generator().manual_seed(len(list(network.parameters())))
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return network.eval()


def stable_diffusion(folder: Path, *, unet: dict[str, Any] = SD1_UNET, **changes: Any) -> Any:
    """A StableDiffusionPipeline like the first."""
    parts = {
        "unet": randomised(UNet2DConditionModel(**unet)),
        "vae": randomised(AutoencoderKL(**VAE)),
        "text_encoder": randomised(CLIPTextModel(text_config())),
        "tokenizer": tokenizer(folder / "raw"),
        "scheduler": diffusers.PNDMScheduler(**LATENT_BETAS, skip_prk_steps=True, steps_offset=1),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }
    return diffusers.StableDiffusionPipeline(**{**parts, **changes})


def stable_diffusion_2(folder: Path) -> Any:
    """The second, at 768 pixels: OpenCLIP's encoder without its last layer, v."""
    return stable_diffusion(
        folder,
        unet={**SD2_UNET, "sample_size": 96},
        text_encoder=randomised(CLIPTextModel(text_config(hidden_act="gelu", num_hidden_layers=23, pad_token_id=0))),
        tokenizer=tokenizer(folder / "raw", pad="!"),
        scheduler=diffusers.DDIMScheduler(
            **LATENT_BETAS, prediction_type="v_prediction", steps_offset=1, set_alpha_to_one=False, clip_sample=False
        ),
    )


def second_encoder() -> Any:
    return randomised(CLIPTextModelWithProjection(text_config(hidden_act="gelu", pad_token_id=0)))


def stable_diffusion_xl(folder: Path) -> Any:
    return diffusers.StableDiffusionXLPipeline(
        unet=randomised(UNet2DConditionModel(**XL_UNET)),
        vae=randomised(AutoencoderKL(**VAE, scaling_factor=0.13025)),
        text_encoder=randomised(CLIPTextModel(text_config())),
        text_encoder_2=second_encoder(),
        tokenizer=tokenizer(folder / "raw"),
        tokenizer_2=tokenizer(folder / "raw_2", pad="!"),
        scheduler=diffusers.EulerDiscreteScheduler(**LATENT_BETAS, steps_offset=1, timestep_spacing="leading"),
        add_watermarker=False,
    )


def refiner(folder: Path) -> Any:
    return diffusers.StableDiffusionXLImg2ImgPipeline(
        unet=randomised(UNet2DConditionModel(**REFINER_UNET)),
        vae=randomised(AutoencoderKL(**VAE, scaling_factor=0.13025)),
        text_encoder=None,
        text_encoder_2=second_encoder(),
        tokenizer=None,
        tokenizer_2=tokenizer(folder / "raw_2", pad="!"),
        scheduler=diffusers.EulerDiscreteScheduler(**LATENT_BETAS, steps_offset=1, timestep_spacing="leading"),
        requires_aesthetics_score=True,
        force_zeros_for_empty_prompt=False,
        add_watermarker=False,
    )


def controlnet(unet: dict[str, Any] = SD1_UNET) -> Any:
    made = {k: v for k, v in unet.items() if k not in ("up_block_types", "sample_size")}
    return randomised(ControlNetModel(**made))


def sd_inpaint(folder: Path) -> Any:
    """Nine channels in: noisy latents, mask, masked latents."""
    parts = stable_diffusion(folder, unet={**SD1_UNET, "in_channels": 9}).components
    return diffusers.StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False)


def sd_controlnet(folder: Path) -> Any:
    parts = stable_diffusion(folder).components
    return diffusers.StableDiffusionControlNetPipeline(**parts, controlnet=controlnet(), requires_safety_checker=False)


def lcm(folder: Path) -> Any:
    """Distilled with guidance: the UNet is told the scale."""
    parts = stable_diffusion(folder, unet={**SD1_UNET, "time_cond_proj_dim": 16}).components
    parts["scheduler"] = diffusers.LCMScheduler(clip_sample=False)
    return diffusers.LatentConsistencyModelPipeline(**parts, requires_safety_checker=False)


def ddpm(folder: Path) -> Any:
    unet = diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return diffusers.DDPMPipeline(unet=randomised(unet), scheduler=diffusers.DDPMScheduler(variance_type="fixed_large"))


def dit(folder: Path) -> Any:
    network = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8
    )
    return diffusers.DiTPipeline(
        transformer=randomised(network),
        vae=randomised(AutoencoderKL(**VAE)),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
    )


FOLDERS = {
    "sd1": stable_diffusion,
    "sd2": stable_diffusion_2,
    "xl": stable_diffusion_xl,
    "refiner": refiner,
    "inpaint": sd_inpaint,
    "controlnet": sd_controlnet,
    "lcm": lcm,
    "ddpm": ddpm,
    "dit": dit,
}


@cache
def root() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="pellucid-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def saved(name: str) -> tuple[Any, Path]:
    """A pipeline and the folder that diffusers saved it to: made once a run, to be read only."""
    pipe = FOLDERS[name](root() / f"{name}-raw")
    pipe.save_pretrained(root() / name)
    return pipe, root() / name


def copied(name: str, folder: Path) -> Path:
    """A copy of a saved pipeline, to be spoilt."""
    return Path(shutil.copytree(saved(name)[1], folder / name))


# Original names, written from the layout of CompVis's UNet and not from our tables.


def original_unet(state: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """A diffusers UNet or ControlNet under CompVis's names."""
    count = len(config["down_block_types"])
    layers, out, number = config["layers_per_block"], {}, 0
    out |= moved(state, "conv_in", "input_blocks.0.0")
    for level in range(count):
        for layer in range(layers):
            number += 1
            out |= resnet(state, f"down_blocks.{level}.resnets.{layer}", f"input_blocks.{number}.0")
            out |= moved(state, f"down_blocks.{level}.attentions.{layer}", f"input_blocks.{number}.1")
        if level < count - 1:
            number += 1
            out |= moved(state, f"down_blocks.{level}.downsamplers.0.conv", f"input_blocks.{number}.0.op")
    out |= resnet(state, "mid_block.resnets.0", "middle_block.0")
    out |= moved(state, "mid_block.attentions.0", "middle_block.1")
    out |= resnet(state, "mid_block.resnets.1", "middle_block.2")
    for level in range(count):
        for layer in range(layers + 1):
            number = level * (layers + 1) + layer
            out |= resnet(state, f"up_blocks.{level}.resnets.{layer}", f"output_blocks.{number}.0")
            attention = moved(state, f"up_blocks.{level}.attentions.{layer}", f"output_blocks.{number}.1")
            doubling = f"output_blocks.{number}.{2 if attention else 1}.conv"
            out |= attention
            if layer == layers:
                out |= moved(state, f"up_blocks.{level}.upsamplers.0.conv", doubling)
    for old, new in (
        ("time_embedding.linear_1", "time_embed.0"),
        ("time_embedding.linear_2", "time_embed.2"),
        ("add_embedding.linear_1", "label_emb.0.0"),
        ("add_embedding.linear_2", "label_emb.0.2"),
        ("conv_norm_out", "out.0"),
        ("conv_out", "out.2"),
    ):
        out |= moved(state, old, new)
    return out


def original_controlnet(state: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    out = original_unet(state, config)
    out |= moved(state, "controlnet_mid_block", "middle_block_out.0")
    for number in range(100):
        out |= moved(state, f"controlnet_down_blocks.{number}", f"zero_convs.{number}.0")
        out |= moved(state, f"controlnet_cond_embedding.blocks.{number}", f"input_hint_block.{2 * number + 2}")
    last = 2 + 2 * len([k for k in state if k.startswith("controlnet_cond_embedding.blocks.") and k.endswith("weight")])
    out |= moved(state, "controlnet_cond_embedding.conv_in", "input_hint_block.0")
    return out | moved(state, "controlnet_cond_embedding.conv_out", f"input_hint_block.{last}")


def original_vae(state: dict[str, Tensor], levels: int = 2) -> dict[str, Tensor]:
    out = {}
    for name, tensor in state.items():
        name = name.replace("mid_block.attentions.0.to_out.0", "mid.attn_1.proj_out")
        name = name.replace("mid_block.attentions.0.group_norm", "mid.attn_1.norm")
        name = name.replace("mid_block.attentions.0.to_", "mid.attn_1.")
        name = name.replace("mid_block.resnets.0", "mid.block_1").replace("mid_block.resnets.1", "mid.block_2")
        name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        name = name.replace("downsamplers.0", "downsample").replace("upsamplers.0", "upsample")
        name = name.replace("resnets", "block").replace("down_blocks", "down")
        for level in range(levels):
            name = name.replace(f"up_blocks.{level}.", f"up.{levels - 1 - level}.")
        conv = ".mid.attn_1." in name and tensor.ndim == 2
        out[name] = tensor[:, :, None, None] if conv else tensor
    return out


def original_open_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A CLIP text encoder under OpenCLIP's names, q, k and v fused."""
    state = {name.removeprefix("text_model."): tensor for name, tensor in state.items()}
    out = {
        "positional_embedding": state["embeddings.position_embedding.weight"],
        "token_embedding.weight": state["embeddings.token_embedding.weight"],
        **moved(state, "final_layer_norm", "ln_final"),
    }
    if "text_projection.weight" in state:
        out["text_projection"] = state["text_projection.weight"].T.contiguous()
    layers = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("encoder.layers."))
    for layer in range(layers):
        old, new = f"encoder.layers.{layer}", f"transformer.resblocks.{layer}"
        for a, b in (
            ("layer_norm1", "ln_1"),
            ("layer_norm2", "ln_2"),
            ("mlp.fc1", "mlp.c_fc"),
            ("mlp.fc2", "mlp.c_proj"),
        ):
            out |= moved(state, f"{old}.{a}", f"{new}.{b}")
        out |= moved(state, f"{old}.self_attn.out_proj", f"{new}.attn.out_proj")
        for kind in ("weight", "bias"):
            parts = [state[f"{old}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            out[f"{new}.attn.in_proj_{kind}"] = torch.cat(parts)
    return out


def resnet(state: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    inner = {
        "norm1": "in_layers.0",
        "conv1": "in_layers.2",
        "time_emb_proj": "emb_layers.1",
        "norm2": "out_layers.0",
        "conv2": "out_layers.3",
        "conv_shortcut": "skip_connection",
    }
    return {k: v for a, b in inner.items() for k, v in moved(state, f"{old}.{a}", f"{new}.{b}").items()}


def moved(state: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {new + name.removeprefix(old): t for name, t in state.items() if name.startswith(f"{old}.")}


def prefixed(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def checkpoint(pipe: Any) -> dict[str, Tensor]:
    """A whole pipeline as the original single file: Stable Diffusion 1, 2, XL or the refiner."""
    unet = original_unet(pipe.unet.state_dict(), pipe.unet.config)
    out = prefixed("model.diffusion_model.", unet)
    out |= prefixed("first_stage_model.", original_vae(pipe.vae.state_dict()))
    second = getattr(pipe, "text_encoder_2", None)
    if second is not None:
        place = "conditioner.embedders.0" if pipe.text_encoder is None else "conditioner.embedders.1"
        out |= prefixed(f"{place}.model.", original_open_clip(second.state_dict()))
    if pipe.text_encoder is None:
        return out
    state = {f"text_model.{k.removeprefix('text_model.')}": v for k, v in pipe.text_encoder.state_dict().items()}
    if pipe.text_encoder.config.hidden_act == "gelu":
        out |= prefixed("cond_stage_model.model.", original_open_clip(state))
        last = {k: torch.ones_like(v) for k, v in out.items() if ".resblocks.22." in k}
        out |= {k.replace(".resblocks.22.", ".resblocks.23."): v for k, v in last.items()}
        return out | {"cond_stage_model.model.text_projection": torch.ones(64, 64)}
    return out | prefixed("conditioner.embedders.0.transformer." if second else "cond_stage_model.transformer.", state)


def extras(folder: Path) -> tuple[Path, Path, Path]:
    """A ControlNet, an image encoder and an IP-Adapter for the tiny model `sd1`, saved in a folder."""
    unet = saved("sd1")[0].unet
    net = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 16))
    net.save_pretrained(folder / "control")
    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, projection_dim=20, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=8,
    )  # fmt: skip
    CLIPVisionModelWithProjection(config).save_pretrained(folder / "eyes")
    held = {"image_proj.proj.weight": torch.ones(4 * 64, 20), "image_proj.proj.bias": torch.ones(4 * 64)}
    held |= {"image_proj.norm.weight": torch.ones(64), "image_proj.norm.bias": torch.ones(64)}
    for number, name in enumerate(unet.attn_processors):
        if "attn2" in name:
            inner = unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
            held |= {f"ip_adapter.{number}.to_{k}_ip.weight": torch.ones(inner, 64) for k in "kv"}
    save_file(held, folder / "ip.safetensors")
    return folder / "control", folder / "eyes", folder / "ip.safetensors"
