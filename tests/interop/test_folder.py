"""diffusers folders: every tensor and config is diffusers' own, and what is not a model says what it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pellucid.core.errors import PellucidError
from pellucid.interop import source
from pellucid.interop.components import Components, class_of
from pellucid.interop.family import contradictions
from pellucid.interop.save import save_component
from pellucid.interop.source import load_component, load_image_encoder, read_components
from pellucid.models.clip import CLIPTextEncoder
from pellucid.models.controlnet import ControlNet
from pellucid.models.dit import DiT, PixArt
from pellucid.models.unet import UNet
from pellucid.models.unet_config import UNetConfig
from pellucid.models.vae import AutoencoderKL, VAEConfig


def same_weights(ours: nn.Module, theirs: Any) -> bool:
    """Names and values; transformers 5 leaves the outermost name of a lone encoder away."""
    mine = ours.state_dict()
    other = theirs.state_dict()
    if isinstance(ours, CLIPTextEncoder) and "embeddings.token_embedding.weight" in other:
        other = {f"text_model.{name}": tensor for name, tensor in other.items()}
    return mine.keys() == other.keys() and all(torch.equal(mine[k], other[k]) for k in mine)


def edit(path: Path, **changes: Any) -> None:
    """Changes keys of a JSON file; ... takes one away."""
    held = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps({k: v for k, v in held.items() if v is not ...}), encoding="utf-8")


def refusal(where: Any, code: str, **options: Any) -> str:
    """The one line that a bad folder is refused with."""
    with pytest.raises(PellucidError, match=r"must|exists|lists") as error:
        read_components(where, **options)
    assert error.value.code == code
    assert "\n" not in str(error.value)
    return str(error.value)


# Good folders


@pytest.mark.parametrize("name", sorted(tiny.FOLDERS))
def test_every_tensor_is_diffusers_own(name: str) -> None:
    pipe, folder = tiny.saved(name)
    found = read_components(folder)
    assert found.pipeline_class == type(pipe).__name__
    assert found.notes == ()
    network = getattr(pipe, "unet", None) or pipe.transformer
    assert same_weights(found.network, network)
    assert class_of(found.network) == type(network).__name__
    encoders = [e for e in (getattr(pipe, part, None) for part in ("text_encoder", "text_encoder_2")) if e is not None]
    assert len(found.text_encoders) == len(encoders) == len(found.tokenizers)
    assert all(same_weights(mine, other) for mine, other in zip(found.text_encoders, encoders, strict=True))
    assert (found.vae is None) == (not hasattr(pipe, "vae"))
    assert found.vae is None or same_weights(found.vae, pipe.vae)
    assert [same_weights(c, pipe.controlnet) for c in found.controlnets] == [True] * hasattr(pipe, "controlnet")
    assert found.scheduler["_class_name"] == type(pipe.scheduler).__name__


@pytest.mark.parametrize("name", ["sd1", "sd2", "ddpm"])
def test_schedule_and_target_are_the_scheduler_s(name: str) -> None:
    pipe, folder = tiny.saved(name)
    found = read_components(folder)
    assert found.target == ("v" if name == "sd2" else "eps")
    betas = torch.as_tensor(found.schedule.betas, dtype=torch.float64)  # type: ignore[attr-defined]
    assert torch.allclose(betas, pipe.scheduler.betas.double(), rtol=1e-6)  # diffusers' are float32


def test_tokens_are_transformers() -> None:
    pipe, folder = tiny.saved("xl")
    for ours, theirs in zip(read_components(folder).tokenizers, (pipe.tokenizer, pipe.tokenizer_2), strict=True):
        text = "abc ! de"
        assert ours.encode(text) == theirs(text, padding="max_length").input_ids


def test_what_model_index_says_besides_parts(tmp_path: Path) -> None:
    folder = tiny.copied("dit", tmp_path)
    edit(folder / "model_index.json", id2label={"0": "tench, Tinca tinca", "1": "goldfish"})  # as published
    assert read_components(folder).labels == {0: "tench, Tinca tinca", 1: "goldfish"}
    edit(folder / "model_index.json", id2label={"fish": "goldfish"})
    assert "class numbers to names" in refusal(folder, "labels")
    refiner = read_components(tiny.saved("refiner")[1])
    assert refiner.extra == {"force_zeros_for_empty_prompt": False, "requires_aesthetics_score": True}
    assert read_components(tiny.saved("xl")[1]).extra == {"force_zeros_for_empty_prompt": True}


def test_a_dit_keeps_one_embedder_where_all_are_equal(tmp_path: Path) -> None:
    folder = tiny.copied("dit", tmp_path)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    first = "transformer_blocks.0.norm1.emb."
    shared = {k: state[first + k.split(".emb.")[1]] if ".norm1.emb." in k else t for k, t in state.items()}
    save_file({k: t.clone() for k, t in shared.items()}, file)
    network = read_components(folder).network
    assert isinstance(network, DiT)
    blocks = network.transformer_blocks
    assert blocks[0].norm1["emb"] is blocks[1].norm1["emb"]  # type: ignore[index,union-attr]
    assert network.state_dict().keys() == state.keys()


def test_shards_and_variants(tmp_path: Path) -> None:
    pipe, _ = tiny.saved("sd1")
    pipe.save_pretrained(tmp_path / "plain", max_shard_size="100KB")
    assert (tmp_path / "plain" / "unet" / "diffusion_pytorch_model.safetensors.index.json").is_file()
    plain = read_components(tmp_path / "plain")
    assert same_weights(plain.network, pipe.unet)
    assert same_weights(plain.text_encoders[0], pipe.text_encoder)

    pipe.save_pretrained(tmp_path / "fp16", max_shard_size="100KB", variant="fp16")
    only = read_components(tmp_path / "fp16")
    assert same_weights(only.network, pipe.unet)
    assert sum("of the variant fp16" in note for note in only.notes) == 3  # unet, vae and text encoder
    assert read_components(tmp_path / "fp16", variant="fp16").notes == ()
    assert "got 'bf16'" in refusal(tmp_path / "plain", "variant", variant="bf16")


def test_the_plain_weights_unless_a_variant_is_named(tmp_path: Path) -> None:
    folder = tiny.copied("sd1", tmp_path)
    unet = folder / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({k: t * 2 for k, t in load_file(unet).items()}, unet.with_suffix(".fp16.safetensors"))
    plain, half = read_components(folder), read_components(folder, variant="fp16")
    assert torch.equal(2 * plain.network.conv_in.weight, half.network.conv_in.weight)
    assert [note.split()[0] for note in half.notes] == ["text_encoder", "vae"]  # they have no fp16


def test_dtype() -> None:
    found = read_components(tiny.saved("sd1")[1], dtype="bfloat16", device="cpu")
    parts = (found.network, found.vae, *found.text_encoders)
    assert {p.dtype for part in parts for p in part.parameters()} == {torch.bfloat16}  # type: ignore[union-attr]


def test_pickled_weights(tmp_path: Path) -> None:
    folder = tiny.copied("ddpm", tmp_path)
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()
    assert same_weights(read_components(folder).network, tiny.saved("ddpm")[0].unet)


# Folders of one network


def flat(tmp_path: Path) -> Path:
    """The layout of the first DDPM repositories: the network and its scheduler at the root."""
    folder = tiny.copied("ddpm", tmp_path)
    for path in [*(folder / "unet").iterdir(), *(folder / "scheduler").iterdir()]:
        path.rename(folder / path.name)
    shutil.rmtree(folder / "unet")
    shutil.rmtree(folder / "scheduler")
    return folder


@pytest.mark.parametrize("listed", [True, False])
def test_a_network_at_the_root(tmp_path: Path, listed: bool) -> None:
    folder = flat(tmp_path)
    if not listed:
        (folder / "model_index.json").unlink()
    found = read_components(folder)
    assert found.pipeline_class == "DDPMPipeline"
    assert same_weights(found.network, tiny.saved("ddpm")[0].unet)
    assert found.scheduler["variance_type"] == "fixed_large"


def test_attention_under_its_old_names(tmp_path: Path) -> None:
    folder = tiny.copied("ddpm", tmp_path)
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    old = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
    state = load_file(file)
    for new, name in old.items():
        state = {k.replace(new, name): t for k, t in state.items()}
    assert any(".proj_attn." in k for k in state)
    save_file(state, file)
    assert same_weights(read_components(folder).network, tiny.saved("ddpm")[0].unet)


def test_the_first_schedulers_keys_are_inert(tmp_path: Path) -> None:
    folder = tiny.copied("ddpm", tmp_path)
    edit(folder / "scheduler" / "scheduler_config.json", tensor_format="pt", timestep_values=None)
    assert read_components(folder).target == "eps"


# One component


@pytest.mark.parametrize(
    ("name", "part", "kind"),
    [
        ("controlnet", "controlnet", ControlNet),
        ("sd1", "vae", AutoencoderKL),
        ("xl", "text_encoder_2", CLIPTextEncoder),
    ],
)
def test_one_component(name: str, part: str, kind: type[nn.Module]) -> None:
    pipe, folder = tiny.saved(name)
    found = load_component(folder / part)
    assert isinstance(found, kind)
    assert same_weights(found, getattr(pipe, part))


def test_a_component_s_config_can_be_overruled() -> None:
    found = load_component(tiny.saved("sd1")[1] / "vae", config={"scaling_factor": 0.5})
    assert found.config.scaling_factor == 0.5


def test_tiny_vae_and_image_encoder(tmp_path: Path) -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    small = tiny.randomised(
        diffusers.AutoencoderTiny(
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        )
    )
    small.save_pretrained(tmp_path / "taesd")
    assert same_weights(load_component(tmp_path / "taesd"), small)
    config = CLIPVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4
    )
    seer = tiny.randomised(CLIPVisionModelWithProjection(config))
    seer.save_pretrained(tmp_path / "image_encoder")
    assert same_weights(load_component(tmp_path / "image_encoder"), seer)


def test_a_whole_clip_and_its_vision_half(tmp_path: Path) -> None:
    """As transformers' CLIPModel computes both; the space that they share is the whole's, whatever a half says."""
    from transformers import CLIPConfig, CLIPModel

    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1,
              "image_size": 8, "patch_size": 4, "projection_dim": 12}  # fmt: skip
    settings = CLIPConfig(text_config=tiny.text_config().to_dict(), vision_config=vision, projection_dim=10)
    peer = tiny.randomised(CLIPModel(settings)).eval()
    peer.save_pretrained(tmp_path / "clip")
    whole, half = load_component(tmp_path / "clip"), load_image_encoder(tmp_path / "clip")
    assert same_weights(whole, peer)
    assert (half.training, half.config.projection_dim) == (False, 10)
    ids, pixels = torch.arange(6).reshape(2, 3), torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = peer(input_ids=ids, pixel_values=pixels)
        seen = peer.visual_projection(peer.vision_model(pixels).pooler_output)
        assert torch.allclose(whole.embed_text(ids), theirs.text_embeds, atol=1e-5)
        assert torch.allclose(whole.embed_image(pixels), theirs.image_embeds, atol=1e-5)
        assert torch.allclose(half(pixels).pooled, seen, atol=1e-5)
    save_component(half, tmp_path / "half")
    again = load_image_encoder(tmp_path / "half")
    assert again.config == half.config
    with torch.no_grad():
        assert torch.equal(again(pixels).pooled, half(pixels).pooled)
    with pytest.raises(PellucidError, match="a CLIP vision encoder or a whole CLIP; got") as error:
        load_image_encoder(tiny.saved("sd1")[1] / "vae")
    assert error.value.code == "component-kind"


def test_several_controlnets(tmp_path: Path) -> None:
    pipe, _ = tiny.saved("controlnet")
    second = tiny.controlnet()
    with torch.no_grad():
        second.conv_in.weight.mul_(2)
    several = diffusers.StableDiffusionControlNetPipeline(
        **{**pipe.components, "controlnet": [pipe.controlnet, second]}, requires_safety_checker=False
    )
    several.save_pretrained(tmp_path)
    found = read_components(tmp_path).controlnets
    assert len(found) == 2
    assert same_weights(found[0], pipe.controlnet)
    assert same_weights(found[1], second)


@pytest.mark.parametrize("where", ["sd1", "sd1/scheduler", "sd1/tokenizer"])
def test_what_is_no_component(where: str) -> None:
    tiny.saved("sd1")
    with pytest.raises(PellucidError, match=r"component in \w+ must be a folder with config\.json") as error:
        load_component(tiny.root() / where)
    assert error.value.code == "not-a-component"


# What is left out, and said so


def test_a_safety_checker_is_left_out(tmp_path: Path) -> None:
    folder = tiny.copied("sd1", tmp_path)
    edit(
        folder / "model_index.json",
        safety_checker=["stable_diffusion", "StableDiffusionSafetyChecker"],
        feature_extractor=["transformers", "CLIPImageProcessor"],
    )
    notes = read_components(folder).notes
    assert sorted(note.split()[0] for note in notes) == ["feature_extractor", "safety_checker"]
    assert all("is not read" in note for note in notes)


def test_pixart_without_its_text_encoder(tmp_path: Path) -> None:
    network = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=6,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        sample_size=8,
        cross_attention_dim=12,
        caption_channels=16,
    )
    parts = {"vae": tiny.saved("sd1")[0].vae, "scheduler": diffusers.DPMSolverMultistepScheduler()}
    pipe = diffusers.PixArtAlphaPipeline(
        tokenizer=None, text_encoder=None, transformer=tiny.randomised(network), **parts
    )
    pipe.save_pretrained(tmp_path)
    edit(
        tmp_path / "model_index.json",
        text_encoder=["transformers", "T5EncoderModel"],
        tokenizer=["transformers", "T5Tokenizer"],
    )
    found = read_components(tmp_path)
    assert isinstance(found.network, PixArt)
    assert same_weights(found.network, network)
    assert found.text_encoders == found.tokenizers == ()
    assert "T5EncoderModel" in found.notes[0]
    assert "prompt_embeds" in found.notes[0]


def test_a_sampler_that_does_not_run_leaves_its_schedule(tmp_path: Path) -> None:
    folder = tiny.copied("ddpm", tmp_path)
    edit(folder / "scheduler" / "scheduler_config.json", variance_type="learned_range")
    found = read_components(folder)
    assert found.target == "eps"
    assert "Sampling with a learned variance is refused" in found.notes[0]


@pytest.mark.parametrize("name", ["sd1", "inpaint"])
def test_a_scheduler_runs_as_its_pipeline_sets_it_right(tmp_path: Path, name: str) -> None:
    """diffusers' pipelines mend three keys of old configs, so the images depend on it."""
    folder = tiny.copied(name, tmp_path)
    edit(
        folder / "scheduler" / "scheduler_config.json",
        _class_name="PNDMScheduler" if name == "inpaint" else "DDIMScheduler",
        steps_offset=...,
        skip_prk_steps=... if name == "sd1" else False,
        clip_sample=True if name == "sd1" else ...,
    )
    found = read_components(folder)
    with pytest.warns(FutureWarning):
        pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    keys = ("steps_offset", "clip_sample" if name == "sd1" else "skip_prk_steps")
    assert {key: found.scheduler[key] for key in keys} == {key: pipe.scheduler.config[key] for key in keys}
    assert sum(key in note for note in found.notes for key in keys) == 2


# Contradictions


UNETS = {
    "SD 1": UNetConfig(cross_attention_dim=768, sample_size=64),
    "SD 2 base": UNetConfig(cross_attention_dim=1024, sample_size=64),
    "SD 2 at 768": UNetConfig(cross_attention_dim=1024, sample_size=96),
    "SD 2 inpainting": UNetConfig(cross_attention_dim=1024, sample_size=64, in_channels=9),
    "SDXL": UNetConfig(
        cross_attention_dim=2048,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    ),
    "unknown": UNetConfig(cross_attention_dim=512),
}


@pytest.mark.parametrize(
    ("family", "usual"),
    [("SD 1", "eps"), ("SD 2 base", "eps"), ("SD 2 at 768", "v"), ("SD 2 inpainting", "eps"), ("SDXL", "eps")],
)
def test_a_target_that_the_family_does_not_have_is_reported(family: str, usual: str) -> None:
    with torch.device("meta"):
        unet = UNet(UNETS[family])
    other = "eps" if usual == "v" else "v"
    assert contradictions(unet, None, {}, usual) == []
    (note,) = contradictions(unet, None, {}, other)
    assert f"the target is {other}" in note
    assert f"predicts {usual}" in note
    assert f"target={usual!r}" in note


def test_other_contradictions() -> None:
    with torch.device("meta"):
        unet, unknown = UNet(UNETS["SDXL"]), UNet(UNETS["unknown"])
        vae = AutoencoderKL(VAEConfig())
    assert ["scaling_factor is 0.18215" in note for note in contradictions(unet, vae, {}, "eps")] == [True]
    assert contradictions(unknown, vae, {}, "v") == []
    (note,) = contradictions(unknown, vae, {"rescale_betas_zero_snr": True}, "eps")
    assert "zero SNR" in note


def test_target_overrules_the_scheduler_and_is_reported() -> None:
    folder = tiny.saved("sd2")[1]
    found = read_components(folder, target="eps")
    assert found.target == "eps"
    assert found.scheduler["prediction_type"] == "epsilon"
    assert found.notes == ("the scheduler says v_prediction; target='eps' was asked for and is used.",)
    assert read_components(folder, target="v").notes == ()
    assert "target must be one of" in refusal(folder, "unknown-target", target="velo")


def test_a_v_scheduler_beside_a_first_unet(tmp_path: Path) -> None:
    """End to end: the notes carry it, and what the file says is used."""
    pipe = tiny.stable_diffusion(
        tmp_path,
        unet={**tiny.SD1_UNET, "cross_attention_dim": 768},
        text_encoder=tiny.CLIPTextModel(tiny.text_config(hidden_size=768, num_attention_heads=12, num_hidden_layers=1)),
        scheduler=tiny.saved("sd2")[0].scheduler,
    )
    pipe.save_pretrained(tmp_path / "model")
    found = read_components(tmp_path / "model")
    assert found.target == "v"
    assert "Stable Diffusion 1 predicts eps: v is used" in found.notes[-1]


# Bad folders: each one line


def test_not_a_model_folder(tmp_path: Path) -> None:
    assert "an empty folder" in refusal(tmp_path, "not-a-model")
    (tmp_path / "holiday.jpg").touch()
    text = refusal(tmp_path, "not-a-model")
    assert "model_index.json" in text
    assert "holiday.jpg" in text
    (tmp_path / "v1-5.safetensors").touch()
    assert "name the file: v1-5.safetensors" in refusal(tmp_path, "not-a-model")
    (tmp_path / "inner").mkdir()
    shutil.copy(tiny.saved("ddpm")[1] / "model_index.json", tmp_path / "inner")
    assert "A pipeline lies in inner" in refusal(tmp_path, "not-a-model")
    assert "AutoencoderKL" in refusal(tiny.saved("sd1")[1] / "vae", "not-a-model")


@pytest.mark.parametrize("where", ["", "no such folder", "\0", "./none", "a/b/c", "x" * 5000, "none.safetensors"])
def test_what_is_nowhere(where: str) -> None:
    assert "model must be a folder, a file, a bundle's name or a hub id" in refusal(where, "not-found")


def test_what_only_some_sources_take() -> None:
    folder = tiny.saved("ddpm")[1]
    assert "revision" in refusal(folder, "revision", revision="main")
    assert "tokenizer" in refusal(folder, "tokenizer", tokenizer=folder)
    assert "device" in refusal(folder, "device", device="abacus")
    assert "dtype" in refusal(folder, "dtype", dtype="int8")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("LDMPipeline", "VQModel"),
        ("ScoreSdeVePipeline", "predictor with a corrector"),
        ("StableDiffusion3Pipeline", "not among those"),
        ("FluxPipeline", "pellucid.wrap"),
        ("StableDiffusionUpscalePipeline", "not among those"),
    ],
)
def test_pipelines_that_are_not_ours(tmp_path: Path, kind: str, why: str) -> None:
    folder = tiny.copied("ddpm", tmp_path)
    edit(folder / "model_index.json", _class_name=kind)
    text = refusal(folder, "pipeline-class")
    assert kind in text
    assert why in text


@pytest.mark.parametrize(("part", "file"), [("vae", ""), ("tokenizer", ""), ("scheduler", ""), ("unet", "config.json")])
def test_a_missing_component_is_named(tmp_path: Path, part: str, file: str) -> None:
    folder = tiny.copied("sd1", tmp_path)
    if file:
        (folder / part / file).unlink()
    else:
        shutil.rmtree(folder / part)
    assert f"lists {part} (" in refusal(folder, "component-missing")


def test_the_root_does_not_stand_in_for_another_component(tmp_path: Path) -> None:
    folder = tiny.copied("sd1", tmp_path)
    shutil.copytree(folder / "unet", folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "vae")
    assert "lists vae (AutoencoderKL)" in refusal(folder, "component-missing")


def test_missing_weights(tmp_path: Path) -> None:
    folder = tiny.copied("sd1", tmp_path)
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    assert "weights in vae must be" in refusal(folder, "weights-missing")


def test_a_truncated_component(tmp_path: Path) -> None:
    folder = tiny.copied("sd1", tmp_path)
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "truncated or corrupt" in refusal(folder, "weights-corrupt")


def test_wrong_shapes_and_names(tmp_path: Path) -> None:
    folder = tiny.copied("sd1", tmp_path)
    edit(folder / "unet" / "config.json", in_channels=5)
    text = refusal(folder, "weights-shape")
    assert "conv_in.weight of unet must be of shape (32, 5, 3, 3); got (32, 4, 3, 3)" in text
    edit(folder / "unet" / "config.json", in_channels=4, layers_per_block=1)
    assert "unexpected down_blocks" in refusal(folder, "weights-keys")


@pytest.mark.parametrize(
    "changes",
    [{"block_out_channels": "many"}, {"norm_num_groups": 0}, {"block_out_channels": [-4, 8]}, {"unknown_key": 3}],
)
def test_configs_of_the_wrong_kind(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = tiny.copied("sd1", tmp_path)
    edit(folder / "unet" / "config.json", **changes)
    with pytest.raises(PellucidError, match="must") as error:
        read_components(folder)
    assert error.value.code.startswith("config")


def test_parts_of_different_bases(tmp_path: Path) -> None:
    folder = tiny.copied("sd1", tmp_path)
    shutil.rmtree(folder / "unet")
    shutil.copytree(tiny.saved("xl")[1] / "unet", folder / "unet")
    assert "as wide as the network reads (128); got 64" in refusal(folder, "components-fit")


def test_classes_that_are_not_ours(tmp_path: Path) -> None:
    folder = tiny.copied("sd1", tmp_path)
    edit(folder / "model_index.json", vae=["diffusers", "VQModel"])
    assert "vae of sd1 must be a component that Pellucid has; got VQModel" in refusal(folder, "class")
    edit(folder / "model_index.json", vae=["diffusers", "UNet2DModel"])
    assert "vae of sd1 must be a component" in refusal(folder, "class")
    edit(folder / "model_index.json", vae=["diffusers", "AutoencoderKL"], prior=["diffusers", "PriorTransformer"])
    assert "PriorTransformer" in refusal(folder, "class")


def test_an_index_without_a_network(tmp_path: Path) -> None:
    folder = tiny.copied("ddpm", tmp_path)
    edit(folder / "model_index.json", unet=[None, None])
    assert "with a unet or a transformer" in refusal(folder, "parts")


def test_bundles_go_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.copied("ddpm", tmp_path)
    monkeypatch.setattr(source, "BUNDLES", tmp_path)
    assert source.bundles() == ["ddpm"]
    assert isinstance(read_components("ddpm"), Components)
    assert "Nearest: ddpm" in refusal("ddpn", "not-found")


@pytest.mark.parametrize("name", ["~nobody-of-that-name/model", "/proc/self/mem"])
def test_a_home_that_nobody_has_and_a_file_that_cannot_be_read_are_no_models(name: str) -> None:
    assert not source.is_model(name)
    with pytest.raises(PellucidError):
        source.read_components(name)
