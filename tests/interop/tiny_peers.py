"""Tiny random text-to-image pipelines of diffusers' own classes, one a family: what `wrap` is tested with."""

from __future__ import annotations

import string
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import tiny_models as tiny
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast, T5Config, T5EncoderModel

SPECIAL = ["<pad>", "</s>", "<unk>", "<bos>"]
VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": (8, 8, 8, 8),
    "layers_per_block": 1,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "norm_num_groups": 2,
}
FLOW = {"shift": 3.0}
DYNAMIC = {
    "shift": 1.0,
    "use_dynamic_shifting": True,
    "base_image_seq_len": 4,
    "max_image_seq_len": 64,
    "base_shift": 0.4,
    "max_shift": 1.3,
}


def seeded(network: Any, spread: float = 0.15) -> Any:
    """Every weight is drawn, so that no zero-initialised one hides what a network is told."""
    generator = torch.Generator().manual_seed(len(list(network.parameters())))
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    return network.eval()


def letters(padding: str = "right") -> PreTrainedTokenizerFast:
    """A tokenizer of single letters that ends each text, as T5's does."""
    words = {word: i for i, word in enumerate([*SPECIAL, *string.ascii_lowercase, " "])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        bos_token="<bos>",
        padding_side=padding,
        model_max_length=64,
    )


def t5() -> T5EncoderModel:
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return seeded(T5EncoderModel(config))


def gemma() -> Gemma2Model:
    config = Gemma2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return seeded(Gemma2Model(config))


def vae(**changes: Any) -> Any:
    return seeded(diffusers.AutoencoderKL(**{**VAE, **changes}))


def flow(**config: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**(config or FLOW))


def work() -> Path:
    return Path(tempfile.mkdtemp(prefix="pellucid-peer-", dir=tiny.root()))


def sd() -> Any:
    return tiny.stable_diffusion(work())


def sdxl() -> Any:
    return tiny.stable_diffusion_xl(work())


def sd3() -> Any:
    folder = work()
    return diffusers.StableDiffusion3Pipeline(
        transformer=seeded(
            diffusers.SD3Transformer2DModel(
                sample_size=8,
                patch_size=1,
                in_channels=4,
                num_layers=2,
                attention_head_dim=8,
                num_attention_heads=2,
                joint_attention_dim=128,
                caption_projection_dim=16,
                pooled_projection_dim=128,
                out_channels=4,
                pos_embed_max_size=16,
            )
        ),
        scheduler=flow(),
        vae=vae(shift_factor=0.06, scaling_factor=1.5),
        text_encoder=tiny.second_encoder(),
        tokenizer=tiny.tokenizer(folder / "1"),
        text_encoder_2=tiny.second_encoder(),
        tokenizer_2=tiny.tokenizer(folder / "2", pad="!"),
        text_encoder_3=seeded(T5EncoderModel(T5Config(vocab_size=32, d_model=128, d_kv=8, d_ff=16, num_layers=1,
                                                      num_heads=2))),
        tokenizer_3=letters(),
    )  # fmt: skip


def flux(guidance_embeds: bool = False) -> Any:
    return diffusers.FluxPipeline(
        transformer=seeded(
            diffusers.FluxTransformer2DModel(
                patch_size=1,
                in_channels=16,
                num_layers=1,
                num_single_layers=1,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=16,
                pooled_projection_dim=64,
                axes_dims_rope=(4, 4, 8),
                guidance_embeds=guidance_embeds,
            )
        ),
        scheduler=flow(**DYNAMIC),
        vae=vae(shift_factor=0.06, scaling_factor=1.5),
        text_encoder=seeded(tiny.CLIPTextModel(tiny.text_config())),
        tokenizer=tiny.tokenizer(work()),
        text_encoder_2=t5(),
        tokenizer_2=letters(),
    )


def flux_dev() -> Any:
    return flux(guidance_embeds=True)


def pixart(kind: str = "PixArtAlphaPipeline", sizes: bool = True) -> Any:
    network = diffusers.PixArtTransformer2DModel(
        sample_size=128 if sizes else 8,  # the first is where PixArt tells its network the size
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=16,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        use_additional_conditions=sizes,
    )
    return getattr(diffusers, kind)(
        transformer=seeded(network),
        vae=vae(),
        scheduler=diffusers.DPMSolverMultistepScheduler(beta_start=1e-4, beta_end=0.02),
        text_encoder=t5(),
        tokenizer=letters(),
    )


def pixart_sigma() -> Any:
    return pixart("PixArtSigmaPipeline", sizes=False)


def aura_flow() -> Any:
    network = diffusers.AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=16,
        out_channels=4,
        pos_embed_max_size=64,
    )
    return diffusers.AuraFlowPipeline(
        tokenizer=letters(), text_encoder=t5(), vae=vae(), transformer=seeded(network), scheduler=flow(shift=1.73)
    )


def lumina2() -> Any:
    network = diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=24,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=2,
        norm_eps=1e-5,
        scaling_factor=1.0,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(300, 128, 128),
        cap_feat_dim=16,
    )
    return diffusers.Lumina2Pipeline(
        transformer=seeded(network),
        scheduler=flow(shift=6.0),
        vae=vae(shift_factor=0.06, scaling_factor=1.5),
        text_encoder=gemma(),
        tokenizer=letters(),
    )


def sana() -> Any:
    network = diffusers.SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=16,
        sample_size=32,
    )
    coder = diffusers.AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    return diffusers.SanaPipeline(
        tokenizer=letters("right"),
        text_encoder=gemma(),
        vae=seeded(coder),
        transformer=seeded(network),
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )


def chroma() -> Any:
    network = diffusers.ChromaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
        approximator_hidden_dim=32,
        approximator_layers=1,
        approximator_num_channels=16,
    )
    return diffusers.ChromaPipeline(
        scheduler=flow(**DYNAMIC),
        vae=vae(shift_factor=0.06, scaling_factor=1.5),
        text_encoder=t5(),
        tokenizer=letters(),
        transformer=seeded(network),
    )


def lcm() -> Any:
    parts = tiny.stable_diffusion(work(), unet={**tiny.SD1_UNET, "time_cond_proj_dim": 8}).components
    parts["scheduler"] = diffusers.LCMScheduler(**tiny.LATENT_BETAS)
    return diffusers.LatentConsistencyModelPipeline(**parts, requires_safety_checker=False)


def qwen_image() -> Any:
    network = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    coder = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return diffusers.QwenImagePipeline(
        scheduler=flow(**DYNAMIC), vae=seeded(coder), text_encoder=None, tokenizer=None, transformer=seeded(network)
    )


def z_image() -> Any:
    network = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    return diffusers.ZImagePipeline(
        scheduler=flow(**FLOW),
        vae=vae(shift_factor=0.06, scaling_factor=1.5),
        text_encoder=None,
        tokenizer=None,
        transformer=seeded(network),
    )


def cogview4() -> Any:
    network = diffusers.CogView4Transformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
        rope_axes_dim=(16, 16),
    )
    scheduler = flow(
        base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
    )
    return diffusers.CogView4Pipeline(
        tokenizer=None, text_encoder=None, vae=vae(), transformer=seeded(network), scheduler=scheduler
    )


def hunyuan_dit() -> Any:
    network = diffusers.HunyuanDiT2DModel(
        sample_size=16,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        in_channels=4,
        cross_attention_dim=16,
        cross_attention_dim_t5=16,
        pooled_projection_dim=16,
        hidden_size=24,
        activation_fn="gelu-approximate",
        text_len=6,
        text_len_t5=6,
    )
    return diffusers.HunyuanDiTPipeline(
        vae=vae(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=t5(),
        tokenizer_2=letters(),
        transformer=seeded(network),
        scheduler=diffusers.DDPMScheduler(prediction_type="v_prediction", clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sd_pag() -> Any:
    parts = sd().components
    return diffusers.StableDiffusionPAGPipeline(**parts, requires_safety_checker=False)


def embeddings(tokens: int = 6, width: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(seed))


def told(name: str) -> dict[str, Any]:
    """What a tiny pipeline's call needs besides the request: short texts, no rounding of sizes, embeddings."""
    short = {"max_sequence_length": 24}
    ones = torch.ones(1, 6, dtype=torch.int64)
    found: dict[str, dict[str, Any]] = {
        "sd3": short,
        "flux": short,
        "flux-dev": short,
        "pixart-alpha": {"use_resolution_binning": False, **short},
        "pixart-sigma": {"use_resolution_binning": False, **short},
        "aura-flow": short,
        "lumina2": {"max_sequence_length": 32, "system_prompt": "c"},
        "sana": {"use_resolution_binning": False, "complex_human_instruction": None, **short},
        "chroma": short,
        "qwen-image": {
            "prompt_embeds": embeddings(),
            "prompt_embeds_mask": ones,
            "negative_prompt_embeds": embeddings(4, seed=1),
            "negative_prompt_embeds_mask": ones[:, :4],
        },
        "z-image": {"prompt_embeds": [embeddings()[0]], "negative_prompt_embeds": [embeddings(seed=1)[0]]},
        "cogview4": {"prompt_embeds": embeddings(16), "negative_prompt_embeds": embeddings(16, seed=1)},
        "hunyuan-dit": {
            "prompt_embeds": embeddings(),
            "negative_prompt_embeds": embeddings(seed=1),
            "prompt_embeds_2": embeddings(seed=2),
            "negative_prompt_embeds_2": embeddings(seed=3),
            "prompt_attention_mask": ones,
            "negative_prompt_attention_mask": ones,
            "prompt_attention_mask_2": ones,
            "negative_prompt_attention_mask_2": ones,
            "use_resolution_binning": False,
        },
    }
    return dict(found.get(name, {}))


def size(name: str) -> dict[str, int]:
    """Not square, so that a swap shows; the latents of the UNets are 2 pixels per side, the others' 8."""
    if name in ("sana", "hunyuan-dit"):
        return {"width": 64, "height": 64}
    small = name in ("sd", "sdxl", "lcm", "sd-pag")
    return {"width": 16, "height": 24} if small else {"width": 32, "height": 48}


MAKERS: dict[str, Callable[[], Any]] = {
    "sd": sd,
    "sdxl": sdxl,
    "sd3": sd3,
    "flux": flux,
    "flux-dev": flux_dev,
    "pixart-alpha": pixart,
    "pixart-sigma": pixart_sigma,
    "aura-flow": aura_flow,
    "lumina2": lumina2,
    "sana": sana,
    "chroma": chroma,
    "lcm": lcm,
    "qwen-image": qwen_image,
    "z-image": z_image,
    "cogview4": cogview4,
    "hunyuan-dit": hunyuan_dit,
    "sd-pag": sd_pag,
}


@cache
def peer(name: str) -> Any:
    """A pipeline, made once a run and shared: the tests prove that `wrap` leaves it as it was."""
    made = MAKERS[name]()
    made.set_progress_bar_config(disable=True)
    return made
