"""Single files: what diffusers' own converters make of them, tensor by tensor; and nothing guessed in silence."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from diffusers.loaders import single_file_utils as oracle
from safetensors.torch import save_file
from torch import Tensor, nn

from pellucid.core.errors import PellucidError
from pellucid.interop import hub, single_file_config, single_file_keys
from pellucid.interop.single_file import BOOKKEEPING
from pellucid.interop.source import load_component, read_components
from pellucid.interop.tokenizer import Tokenizer
from pellucid.models.config import frozen
from pellucid.models.unet import UNet
from pellucid.models.unet_config import UNetConfig

UNET = "model.diffusion_model."


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokenizer comes from the cache of who runs the tests."""
    monkeypatch.setattr(hub, "cached", lambda repo, revision=None: None)


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    save_file({k: t.contiguous() for k, t in tensors.items()}, path, metadata=metadata)
    return path


def letters(folder: Path) -> Path:
    """CLIP's vocabulary, of letters."""
    tiny.tokenizer(folder / "raw").save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def same(ours: nn.Module, tensors: dict[str, Tensor]) -> bool:
    mine = ours.state_dict()
    return mine.keys() == tensors.keys() and all(torch.equal(mine[k], tensors[k]) for k in mine)


def refusal(path: Path, code: str, **options: Any) -> str:
    with pytest.raises(PellucidError, match=r"must") as error:
        read_components(path, **options)
    assert error.value.code == code
    assert "\n" not in str(error.value)
    return str(error.value)


# Agreement with diffusers' converters


@pytest.mark.parametrize("name", ["sd1", "sd2", "xl", "refiner", "inpaint"])
def test_networks_are_what_diffusers_converts_to(name: str, tmp_path: Path) -> None:
    pipe, _ = tiny.saved(name)
    tensors = tiny.checkpoint(pipe)
    target = {"target": "v"} if name == "sd2" else {}
    found = read_components(write(tmp_path / "m.safetensors", tensors), tokenizer=letters(tmp_path), **target)
    unet = oracle.convert_ldm_unet_checkpoint(dict(tensors), dict(pipe.unet.config))
    assert unet.keys() == pipe.unet.state_dict().keys()  # the test's own inverse is right
    assert same(found.network, unet)
    assert same(found.vae, oracle.convert_ldm_vae_checkpoint(dict(tensors), dict(pipe.vae.config)))  # type: ignore[arg-type]
    for encoder, other in zip(found.text_encoders, encoders_of(pipe, tensors), strict=True):
        assert same(encoder, other)


def encoders_of(pipe: Any, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The text encoders, converted by diffusers."""
    made = []
    if pipe.text_encoder is not None and pipe.text_encoder.config.hidden_act == "quick_gelu":
        made.append(oracle.convert_ldm_clip_checkpoint(dict(tensors)))
    for place in ("cond_stage_model", "conditioner.embedders.0", "conditioner.embedders.1"):
        if any(key.startswith(f"{place}.model.") for key in tensors):
            second = getattr(pipe, "text_encoder_2", None)
            made.append(
                oracle.convert_open_clip_checkpoint(second or pipe.text_encoder, dict(tensors), f"{place}.model.")
            )
    return made


@pytest.mark.parametrize("name", ["sd1", "sd2", "xl", "refiner", "inpaint"])
def test_configs_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    """Shapes say all but what the pixels of the training were: the VAE's sample_size has no effect."""
    pipe, folder = tiny.saved(name)
    target = {"target": "v"} if name == "sd2" else {}
    path = write(tmp_path / "m.safetensors", tiny.checkpoint(pipe))
    found, known = read_components(path, tokenizer=letters(tmp_path), **target), read_components(folder)
    assert found.network.config == known.network.config
    assert replace(found.vae.config, sample_size=32) == known.vae.config  # type: ignore[union-attr]
    for ours, theirs in zip(found.text_encoders, known.text_encoders, strict=True):
        assert replace(ours.config, bos_token_id=0) == theirs.config
    assert found.pipeline_class == known.pipeline_class
    assert found.target == known.target
    assert found.schedule == known.schedule
    assert {k: v for k, v in known.extra.items() if k != "requires_safety_checker"} == found.extra
    shared = found.scheduler.keys() & known.scheduler.keys() - {"_diffusers_version"}
    assert {k: found.scheduler[k] for k in shared} == {k: known.scheduler[k] for k in shared} | (
        {} if name in ("sd2", "xl", "refiner") else {"set_alpha_to_one": False}
    )


@pytest.mark.parametrize("name", ["sd1", "sd2", "xl", "refiner"])
def test_tokens_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    """The second family and the second encoder of XL pad with "!", which is then a token of its own in a text too."""
    pipe, folder = tiny.saved(name)
    path = write(tmp_path / "m.safetensors", tiny.checkpoint(pipe))
    target = {"target": "v"} if name == "sd2" else {}
    found = read_components(path, tokenizer=letters(tmp_path), **target).tokenizers
    known = read_components(folder).tokenizers
    assert [t.encode("ab! c") for t in found] == [t.encode("ab! c") for t in known]


def test_stable_diffusion_2_reads_the_last_layer_but_one(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", tiny.checkpoint(tiny.saved("sd2")[0]))
    (encoder,) = read_components(path, target="v", tokenizer=letters(tmp_path)).text_encoders
    assert encoder.config.num_hidden_layers == 23
    assert encoder.text_projection is None


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("unet", [tiny.SD1_UNET, tiny.SD2_UNET, tiny.XL_UNET], ids=["sd1", "sd2", "xl"])
def test_a_controlnet_of_its_own(tmp_path: Path, unet: dict[str, Any], bare: bool) -> None:
    network = tiny.controlnet(unet)
    tensors = tiny.original_controlnet(network.state_dict(), network.config)
    tensors = tensors if bare else tiny.prefixed("control_model.", tensors)
    found = load_component(write(tmp_path / "control.safetensors", tensors))
    assert same(found, network.state_dict())
    if "addition_embed_type" not in unet:  # diffusers leaves those weights away
        assert same(found, oracle.convert_controlnet_checkpoint(dict(tensors), dict(network.config)))


@pytest.mark.parametrize("prefix", ["", "control_model."])
def test_a_controlnet_is_no_checkpoint(tmp_path: Path, prefix: str) -> None:
    network = tiny.saved("controlnet")[0].controlnet
    tensors = tiny.original_controlnet(network.state_dict(), network.config)
    path = write(tmp_path / "control.safetensors", tiny.prefixed(prefix, tensors))
    assert "with load_component" in refusal(path, "single-file-parts" if prefix else "single-file-kind")


def test_a_checkpoint_with_its_controlnet(tmp_path: Path) -> None:
    pipe, _ = tiny.saved("controlnet")
    control = tiny.original_controlnet(pipe.controlnet.state_dict(), pipe.controlnet.config)
    tensors = tiny.checkpoint(pipe) | tiny.prefixed("control_model.", control)
    path = write(tmp_path / "m.safetensors", tensors)
    found = read_components(path, tokenizer=letters(tmp_path))
    assert found.pipeline_class == "StableDiffusionControlNetPipeline"
    assert same(found.controlnets[0], pipe.controlnet.state_dict())
    assert same(load_component(path), pipe.controlnet.state_dict())


@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
def test_a_vae_of_its_own(tmp_path: Path, prefix: str) -> None:
    vae = tiny.saved("sd1")[0].vae
    tensors = tiny.original_vae(vae.state_dict()) | {"loss.logvar": torch.ones(1), "model_ema.decay": torch.ones(1)}
    path = write(tmp_path / "vae.safetensors", tiny.prefixed(prefix, tensors))
    found = load_component(path, config={"scaling_factor": 0.13025})
    assert same(found, vae.state_dict())
    assert found.config.scaling_factor == 0.13025
    with pytest.raises(PellucidError, match=r"scaling_factor of the VAE.*0\.18215.*0\.13025") as error:
        load_component(path)
    assert error.value.code == "scaling-unknown"


def test_a_ckpt(tmp_path: Path) -> None:
    pipe, _ = tiny.saved("sd1")
    torch.save({"state_dict": tiny.checkpoint(pipe), "global_step": 470000}, tmp_path / "m.ckpt")
    assert same(read_components(tmp_path / "m.ckpt", tokenizer=letters(tmp_path)).network, pipe.unet.state_dict())


def test_text_encoders_without_their_outermost_name(tmp_path: Path) -> None:
    pipe, folder = tiny.saved("sd1")
    old = "cond_stage_model.transformer.text_model."
    tensors = {k.replace(old, "cond_stage_model.transformer."): t for k, t in tiny.checkpoint(pipe).items()}
    found = read_components(write(tmp_path / "m.safetensors", tensors), tokenizer=letters(tmp_path))
    assert same(found.text_encoders[0], read_components(folder).text_encoders[0].state_dict())


# The published sizes, without their weights: shapes alone say the config that the families' folders have


PUBLISHED: dict[str, dict[str, Any]] = {
    "SD 1.5": {"cross_attention_dim": 768, "attention_head_dim": 8, "sample_size": 64},
    "SD 1.5 inpainting": {"cross_attention_dim": 768, "attention_head_dim": 8, "sample_size": 64, "in_channels": 9},
    "SD 2.1": {
        "cross_attention_dim": 1024,
        "attention_head_dim": (5, 10, 20, 20),
        "use_linear_projection": True,
        "sample_size": 96,
    },
    "SDXL": {
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
        "sample_size": 128,
    },
    "SDXL refiner": {
        "block_out_channels": (384, 768, 1536, 1536),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": 4,
        "attention_head_dim": (6, 12, 24, 24),
        "cross_attention_dim": 1280,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2560,
        "sample_size": 128,
    },
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_sizes(name: str) -> None:
    config = UNetConfig(**PUBLISHED[name])
    with torch.device("meta"):
        state = UNet(config).state_dict()
    original = tiny.original_unet(state, {f: getattr(config, f) for f in ("down_block_types", "layers_per_block")})
    read = single_file_config.unet_config(original, PUBLISHED[name]["sample_size"])
    assert UNetConfig(**{key: frozen(value) for key, value in read.items()}) == config
    renamed = single_file_keys.renamed(original, single_file_keys.unet_table(read), "UNet")
    assert {k: t.shape for k, t in renamed.items()} == {k: t.shape for k, t in state.items()}


# What it predicts


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    return {name: tiny.checkpoint(tiny.saved(name)[0]) for name in ("sd1", "sd2", "xl")}


def test_stable_diffusion_2_must_be_told(files: dict[str, dict[str, Tensor]], tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", files["sd2"])
    text = refusal(path, "target-unknown")
    assert "target='v'" in text
    assert "target='eps'" in text
    letters(tmp_path)
    for target, size, kind in (("v", 96, "DDIMScheduler"), ("epsilon", 64, "PNDMScheduler")):
        found = read_components(path, target=target)
        assert found.target == {"epsilon": "eps"}.get(target, target)
        assert found.network.config.sample_size == size
        assert found.scheduler["_class_name"] == kind
        assert found.notes == ()


@pytest.mark.parametrize(
    ("metadata", "target"),
    [
        ({"modelspec.prediction_type": "v"}, "v"),
        ({"modelspec.prediction_type": "epsilon"}, "eps"),
        ({"modelspec.architecture": "stable-diffusion-v2-768-v"}, "v"),
        ({"modelspec.architecture": "stable-diffusion-v2-512"}, "eps"),
    ],
)
def test_metadata_says_it(
    files: dict[str, dict[str, Tensor]], tmp_path: Path, metadata: dict[str, str], target: str
) -> None:
    letters(tmp_path)
    found = read_components(write(tmp_path / "m.safetensors", files["sd2"], metadata))
    assert found.target == target
    assert found.notes == ()


@pytest.mark.parametrize(
    ("yaml", "target"),
    [
        ('model:\n  params:\n    parameterization: "v"\n    linear_start: 0.00085\n', "v"),
        ("model:\n  params:\n    linear_start: 0.00085\n", "eps"),
        ("scaling_config:\n  target: sgm.modules.diffusionmodules.denoiser_scaling.VScaling\n", "v"),
        ("nothing: of use\n", None),
    ],
)
def test_the_yaml_beside_it_says_it(
    files: dict[str, dict[str, Tensor]], tmp_path: Path, yaml: str, target: str | None
) -> None:
    letters(tmp_path)
    path = write(tmp_path / "m.safetensors", files["sd2"])
    (tmp_path / "m.yaml").write_text(yaml, encoding="utf-8")
    if target is None:
        assert "must be named" in refusal(path, "target-unknown")
    else:
        assert read_components(path).target == target


def test_the_families_with_one_target_say_that_it_is_assumed(
    files: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    letters(tmp_path)
    found = read_components(write(tmp_path / "m.safetensors", files["sd1"]))
    assert found.target == "eps"
    assert found.notes == ("nothing in the file says what it predicts; eps, as Stable Diffusion 1 does, is used.",)


def test_marks_of_a_v_network(files: dict[str, dict[str, Tensor]], tmp_path: Path) -> None:
    letters(tmp_path)
    marked = files["xl"] | {"v_pred": torch.tensor([]), "ztsnr": torch.tensor([])}
    found = read_components(write(tmp_path / "m.safetensors", marked))
    assert found.target == "v"
    assert found.scheduler["rescale_betas_zero_snr"] is True
    assert found.schedule.level(999).alpha == pytest.approx(0, abs=1e-6)
    assert "the key v_pred says v, but SDXL predicts eps: v is used." in found.notes
    found = read_components(write(tmp_path / "n.safetensors", marked), target="eps")
    assert "target= says eps, but the key v_pred says v: eps is used." in found.notes


# Bookkeeping, and what is not known


TRAINING = [
    "model_ema.decay",
    "model_ema.diffusion_modelinput_blocks00weight",
    "betas",
    "alphas_cumprod",
    "alphas_cumprod_prev",
    "sqrt_one_minus_alphas_cumprod",
    "posterior_log_variance_clipped",
    "log_one_minus_alphas_cumprod",
    "logvar",
    "global_step",
    "denoiser.sigmas",
    "first_stage_model.loss.perceptual_loss.net.slice1.0.weight",
    "cond_stage_model.transformer.text_model.embeddings.position_ids",
    "cond_stage_model.logit_scale",
    "cond_stage_model.transformer.text_projection.weight",
]


def test_bookkeeping_is_no_error(files: dict[str, dict[str, Tensor]], tmp_path: Path) -> None:
    letters(tmp_path)
    more = {name: torch.ones(1) for name in TRAINING}
    found = read_components(write(tmp_path / "m.safetensors", files["sd1"] | more))
    assert "model_ema" in found.notes[-1]
    assert same(found.network, tiny.saved("sd1")[0].unet.state_dict())
    weights = {k for tensors in files.values() for k in tensors} - {"cond_stage_model.model.text_projection"}
    assert not [k for k in weights if BOOKKEEPING.fullmatch(k)]  # no weight passes for bookkeeping


@pytest.mark.parametrize(
    ("key", "code"),
    [
        ("optimizer.step", "single-file-keys"),
        (f"{UNET}output_blocks.1.9.weight", "single-file-keys"),
        (f"{UNET}input_blocks.1.0.in_layers.9.weight", "single-file-keys"),
        (f"{UNET}input_blocks.1.1.extra.weight", "weights-keys"),
        ("first_stage_model.encoder.top.weight", "single-file-keys"),
        ("cond_stage_model.transformer.text_model.extra.weight", "weights-keys"),
    ],
)
def test_an_unknown_name_is_named(files: dict[str, dict[str, Tensor]], tmp_path: Path, key: str, code: str) -> None:
    path = write(tmp_path / "m.safetensors", files["sd1"] | {key: torch.ones(1)})
    assert key.split(".")[-2] in refusal(path, code, tokenizer=letters(tmp_path))


def test_a_missing_weight_is_named(files: dict[str, dict[str, Tensor]], tmp_path: Path) -> None:
    gone = {k: t for k, t in files["sd1"].items() if k != f"{UNET}middle_block.2.out_layers.3.bias"}
    text = refusal(write(tmp_path / "m.safetensors", gone), "weights-keys", tokenizer=letters(tmp_path))
    assert "missing mid_block.resnets.1.conv2.bias" in text


@pytest.mark.parametrize("lacking", ["first_stage_model.", "cond_stage_model.", UNET])
def test_a_checkpoint_that_is_not_whole(files: dict[str, dict[str, Tensor]], tmp_path: Path, lacking: str) -> None:
    left = {k: t for k, t in files["sd1"].items() if not k.startswith(lacking)}
    assert "must hold a whole checkpoint; it lacks" in refusal(
        write(tmp_path / "m.safetensors", left), "single-file-parts"
    )


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("lora_unet_down_blocks_0.lora_down.weight", "LoRA"),
        ("unet.down_blocks.0.attn.to_q.lora_A.weight", "LoRA"),
        ("emb_params", "textual inversion"),
        (f"{UNET}joint_blocks.0.x_block.attn.qkv.weight", "Stable Diffusion 3"),
        ("double_blocks.0.img_attn.qkv.weight", "FLUX"),
        ("edm_mean", "Playground"),
        ("edm_vpred.sigma_max", "CosXL"),
        ("down_blocks.0.resnets.0.conv1.weight", "under diffusers' names"),
        ("encoder.down_blocks.0.resnets.0.conv1.weight", "a VAE under diffusers' names"),
        ("controlnet_cond_embedding.conv_in.weight", "a ControlNet under diffusers' names"),
        ("text_model.embeddings.token_embedding.weight", "a CLIP encoder"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path: Path, key: str, what: str) -> None:
    path = write(tmp_path / "m.safetensors", {key: torch.ones(2)})
    assert what in refusal(path, "single-file-kind")
    with pytest.raises(PellucidError, match=re.escape(what)):
        load_component(path)


def test_uneven_networks_are_refused(files: dict[str, dict[str, Tensor]], tmp_path: Path) -> None:
    """Distilled UNets drop blocks here and there; a config of these families cannot say that."""
    dropped = {k: t for k, t in files["sd1"].items() if not k.startswith(f"{UNET}input_blocks.2.1.")}
    path = write(tmp_path / "m.safetensors", dropped)
    assert "the same throughout" in refusal(path, "single-file-shape", tokenizer=letters(tmp_path))


def test_variants_are_of_folders(files: dict[str, dict[str, Tensor]], tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", files["sd1"])
    assert "left out for a single file" in refusal(path, "variant", variant="fp16")


# Its tokenizer


def test_where_the_tokenizer_comes_from(
    files: dict[str, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m.safetensors", files["sd1"])
    text = refusal(path, "tokenizer-missing")
    assert "vocab.json" in text
    assert "tokenizer=" in text
    assert "tokenizer must be" in refusal(path, "tokenizer-missing", tokenizer=tmp_path / "none")
    known = Tokenizer.load(letters(tmp_path / "elsewhere")).encode("abc")
    cache = tmp_path / "elsewhere" / "tokenizer"
    assert read_components(path, tokenizer=cache).tokenizers[0].encode("abc") == known
    assert read_components(path, tokenizer=cache.parent).tokenizers[0].encode("abc") == known  # a model's folder
    monkeypatch.setattr(hub, "cached", lambda repo, revision=None: cache)
    assert read_components(path).tokenizers[0].encode("abc") == known
    monkeypatch.setattr(hub, "cached", lambda repo, revision=None: None)
    letters(tmp_path)
    assert read_components(path).tokenizers[0].encode("abc") == known
