"""Tiny pipelines of diffusers, PEFT adapters in them, and their files renamed as other trainers name them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from peft import LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from pellucid.interop import lora_file
from pellucid.models import lora

PARITY = 1e-5  # of float32: the peer adds x·A·B where we add to W, so the two round differently
MODULES = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"]
CONVS = ["conv1", "conv2", "conv_shortcut", "time_emb_proj", "downsamplers.0.conv", "upsamplers.0.conv"]
TEXT = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
ATTN = "down_blocks.1.attentions.0.transformer_blocks.0.attn1"


def clip(cls: type[nn.Module], width: int) -> nn.Module:
    settings = CLIPTextConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=16,
        projection_dim=12,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=2,
    )
    return cls(settings).eval()


def tiny_unet(context: int, **settings: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=context,
        attention_head_dim=4,
        norm_num_groups=2,
        **settings,
    ).eval()


def tiny_vae() -> AutoencoderKL:
    return AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, sample_size=8)


def sd_networks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"unet": tiny_unet(10), "text_encoder": clip(CLIPTextModel, 10)}


def xl_networks() -> dict[str, nn.Module]:
    torch.manual_seed(1)
    unet = tiny_unet(
        24,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=12 + 6 * 4,
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
    )
    first, second = clip(CLIPTextModel, 10), clip(CLIPTextModelWithProjection, 14)
    return {"unet": unet, "text_encoder": first, "text_encoder_2": second}


def pipeline(networks: dict[str, nn.Module]) -> Any:
    """A pipeline of diffusers over copies of the networks."""
    mine = copy.deepcopy(networks)
    if "text_encoder_2" in mine:
        return StableDiffusionXLPipeline(
            **mine,
            vae=tiny_vae(),
            tokenizer=None,
            tokenizer_2=None,
            scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
            add_watermarker=False,
        )
    return StableDiffusionPipeline(
        **mine,
        vae=tiny_vae(),
        tokenizer=None,
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


@torch.no_grad()
def outputs(networks: dict[str, nn.Module]) -> dict[str, Tensor]:
    """What each network says to the same input."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(2, 4, 8, 8, generator=draw)
    found = {}
    for name, network in networks.items():
        if name == "unet":
            context = torch.randn(2, 5, network.config.cross_attention_dim, generator=draw)
            told = {"text_embeds": torch.ones(2, 12), "time_ids": torch.ones(2, 6)}
            found[name] = network(x, torch.tensor([3.0, 700.0]), context, added_cond_kwargs=told).sample
        else:
            found[name] = network(torch.tensor([[0, 5, 9, 2]]), output_hidden_states=True).hidden_states[-1]
    return found


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def assert_equal(ours: dict[str, nn.Module], theirs: Any, base: dict[str, nn.Module], touched: set[str]) -> None:
    """Our views answer as their networks do, and those of `touched` otherwise than the base."""
    expected = outputs({name: getattr(theirs, name) for name in base} if not isinstance(theirs, dict) else theirs)
    got, plain = outputs(ours), outputs(base)
    for name in base:
        assert relative(got[name], expected[name]) <= PARITY, name
        assert (relative(expected[name], plain[name]) > 1e-3) == (name in touched), name


def applied(
    path: Path, base: dict[str, nn.Module], scale: lora.Scale = 1.0
) -> tuple[dict[str, nn.Module], lora.Receipt]:
    return lora.apply_all(base, [(lora_file.load(path, base), scale)])


# Adapters of PEFT


def trained(network: nn.Module, settings: Any, seed: int = 0) -> nn.Module:
    """A copy of a network with a random PEFT adapter in it."""
    torch.manual_seed(seed)
    network = copy.deepcopy(network)
    inject_adapter_in_model(settings, network)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    network.peft_config = {"default": settings}
    return network.eval()


def state(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(network).items()}


def unet_config(**settings: Any) -> LoraConfig:
    plain = {"r": 3, "lora_alpha": 5, "target_modules": MODULES + CONVS, "init_lora_weights": False}
    return LoraConfig(**plain | settings)


def text_config(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "lora_alpha": 3, "target_modules": TEXT, "init_lora_weights": False} | settings)


PEFT_CASES = {
    "lora": lambda: unet_config(alpha_pattern={"to_q": 7}),
    "dora": lambda: unet_config(use_dora=True),
    "loha": lambda: LoHaConfig(r=3, alpha=5, target_modules=MODULES + CONVS, init_weights=False),
    "lokr": lambda: LoKrConfig(r=8, alpha=5, target_modules=MODULES + CONVS, init_weights=False),
    "lokr small": lambda: LoKrConfig(
        r=1, alpha=2, target_modules=MODULES + CONVS, init_weights=False, decompose_both=True, use_effective_conv2d=True
    ),
}


# kohya's names


def underscored(name: str) -> str:
    return name.replace(".", "_")


COMPVIS = {  # by hand, for two levels of two layers: input blocks 1, 2, (3 halves), 4, 5; output blocks 0–5
    "down_blocks.0.resnets.0": "input_blocks.1.0",
    "down_blocks.0.resnets.1": "input_blocks.2.0",
    "down_blocks.0.downsamplers.0.conv": "input_blocks.3.0.op",
    "down_blocks.1.resnets.0": "input_blocks.4.0",
    "down_blocks.1.attentions.0": "input_blocks.4.1",
    "down_blocks.1.resnets.1": "input_blocks.5.0",
    "down_blocks.1.attentions.1": "input_blocks.5.1",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
    "up_blocks.0.resnets.0": "output_blocks.0.0",
    "up_blocks.0.attentions.0": "output_blocks.0.1",
    "up_blocks.0.resnets.1": "output_blocks.1.0",
    "up_blocks.0.attentions.1": "output_blocks.1.1",
    "up_blocks.0.resnets.2": "output_blocks.2.0",
    "up_blocks.0.attentions.2": "output_blocks.2.1",
    "up_blocks.0.upsamplers.0.conv": "output_blocks.2.2.conv",
    "up_blocks.1.resnets.0": "output_blocks.3.0",
    "up_blocks.1.resnets.1": "output_blocks.4.0",
    "up_blocks.1.resnets.2": "output_blocks.5.0",
    ".conv1": ".in_layers.2",
    ".conv2": ".out_layers.3",
    ".time_emb_proj": ".emb_layers.1",
    ".conv_shortcut": ".skip_connection",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}


def compvis(name: str) -> str:
    for new, old in COMPVIS.items():
        name = re.sub(re.escape(new) + r"(?=\.|$)", old, name)
    return name


def by_layer(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """PEFT's tensors as {layer: {ending: tensor}}."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        layer, end = re.fullmatch(r"(.+)\.((?:lora|hada|lokr)_.+)", key).groups()
        found.setdefault(layer, {})[end] = tensor
    return found


KOHYA_ENDS = {
    "lora_A.weight": "lora_down.weight",
    "lora_B.weight": "lora_up.weight",
    "lora_magnitude_vector": "dora_scale",
}


def kohya(
    prefix: str, tensors: dict[str, Tensor], alpha: float, spell: Callable[[str], str] = str
) -> dict[str, Tensor]:
    found = {}
    for layer, parts in by_layer(tensors).items():
        name = prefix + underscored(spell(layer))
        found |= {f"{name}.{KOHYA_ENDS.get(end, end)}": tensor.clone() for end, tensor in parts.items()}
        if "lora_magnitude_vector" in parts:  # LyCORIS keeps the norms of outputs as (out, 1, …)
            ones = (1,) * (parts["lora_A.weight"].ndim - 1)
            found[f"{name}.dora_scale"] = parts["lora_magnitude_vector"].reshape(-1, *ones)
        found[f"{name}.alpha"] = torch.tensor(alpha)
    return found


def with_text_model(name: str) -> str:
    return f"text_model.{name.removeprefix('text_model.')}"
