"""Saving: diffusers opens what we write without a word, with the tensors and configs that it wrote itself."""

from __future__ import annotations

import inspect
import json
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file
from torch import nn

from pellucid.core.errors import PellucidError
from pellucid.interop import save
from pellucid.interop.components import Components
from pellucid.interop.save import config_of, save_component, save_components
from pellucid.interop.source import load_component, read_components

PARTS = ("unet", "transformer", "vae", "text_encoder", "text_encoder_2", "controlnet", "image_encoder")
PASSING = ("_name_or_path", "_diffusers_version", "_use_default_values", "transformers_version")


@pytest.fixture
def silence() -> Iterator[list[str]]:
    """What diffusers and transformers complain of while a folder is opened, not while they are imported."""
    for name in (
        "StableDiffusionControlNetPipeline",
        "StableDiffusionXLImg2ImgPipeline",
        "DiTPipeline",
        "DDPMPipeline",
    ):
        getattr(diffusers, name)  # imported here, on first use
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    ear = Ear(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)  # other tests turn it down
        logger.addHandler(ear)
    yield heard
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(ear)
        logger.setLevel(level)


def plain(value: Any) -> Any:
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def settings(network: Any) -> dict[str, Any]:
    """The whole config of a network or a scheduler, defaults filled in; less what says where it came from."""
    raw = network.config.to_dict() if hasattr(network.config, "to_dict") else dict(network.config)
    return {key: plain(value) for key, value in raw.items() if key not in PASSING}


def same(mine: nn.Module, other: nn.Module) -> bool:
    a, b = mine.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def same_components(a: Components, b: Components) -> None:
    for field in fields(Components):
        mine, other = getattr(a, field.name), getattr(b, field.name)
        if field.name == "name":
            continue
        if field.name == "tokenizers":
            assert [t.encode("ab! c") for t in mine] == [t.encode("ab! c") for t in other]
            continue
        pairs = list(zip(*(x if isinstance(x, tuple) else (x,) for x in (mine, other)), strict=True))
        for x, y in pairs:
            if isinstance(x, nn.Module):
                assert same(x, y)
                assert x.config == y.config
            else:
                assert x == y, field.name


# Round trips


@pytest.mark.parametrize("name", sorted(tiny.FOLDERS))
def test_diffusers_opens_what_we_save(name: str, tmp_path: Path, silence: list[str]) -> None:
    pipe, folder = tiny.saved(name)
    save_components(read_components(folder), tmp_path / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "ours")
    assert silence == []
    assert type(again) is type(pipe)
    for part in PARTS:
        before, after = getattr(pipe, part, None), getattr(again, part, None)
        assert (before is None) == (after is None), part
        if before is not None:
            assert same(after, before), part
            assert settings(after) == settings(before), part
    assert settings(again.scheduler) == settings(pipe.scheduler)
    for part in ("tokenizer", "tokenizer_2"):
        if getattr(pipe, part, None) is not None:
            ours, theirs = getattr(again, part), getattr(pipe, part)
            assert ours("ab! c", padding="max_length").input_ids == theirs("ab! c", padding="max_length").input_ids


def test_a_complaint_would_be_heard(tmp_path: Path, silence: list[str]) -> None:
    folder = tiny.copied("ddpm", tmp_path)
    file = folder / "unet" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), "conditioning_channels": 3}))
    diffusers.DDPMPipeline.from_pretrained(folder)
    assert any("conditioning_channels" in words for words in silence)


@pytest.mark.parametrize("name", sorted(tiny.FOLDERS))
def test_we_open_what_we_save(name: str, tmp_path: Path) -> None:
    found = read_components(tiny.saved(name)[1])
    save_components(found, tmp_path / "ours")
    again = read_components(tmp_path / "ours")
    found.extra |= {"requires_safety_checker": False} if "requires_safety_checker" in again.extra else {}
    same_components(found, again)


@pytest.mark.parametrize("name", ["sd1", "sd2", "xl", "refiner", "inpaint"])
def test_a_single_file_becomes_a_folder(name: str, tmp_path: Path, silence: list[str]) -> None:
    """The way from a checkpoint of one file to diffusers goes through us."""
    from safetensors.torch import save_file

    pipe, _ = tiny.saved(name)
    save_file({k: t.contiguous() for k, t in tiny.checkpoint(pipe).items()}, tmp_path / "m.safetensors")
    tiny.tokenizer(tmp_path / "raw").save_pretrained(tmp_path / "tokenizer")
    found = read_components(tmp_path / "m.safetensors", **({"target": "v"} if name == "sd2" else {}))
    save_components(found, tmp_path / "ours")
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "ours")
    assert silence == []
    assert type(again) is type(pipe)
    assert all(same(getattr(again, p), getattr(pipe, p)) for p in PARTS if getattr(pipe, p, None) is not None)


def test_labels(tmp_path: Path) -> None:
    found = replace(read_components(tiny.saved("dit")[1]), labels={0: "tench, Tinca tinca", 7: "cock"})
    save_components(found, tmp_path / "dit")
    assert read_components(tmp_path / "dit").labels == found.labels
    assert diffusers.DiTPipeline.from_pretrained(tmp_path / "dit").labels == {"Tinca tinca": 0, "cock": 7, "tench": 0}


def test_several_controlnets(tmp_path: Path, silence: list[str]) -> None:
    found = read_components(tiny.saved("controlnet")[1])
    other = tiny.controlnet()
    other.save_pretrained(tmp_path / "other")
    both = replace(found, controlnets=(*found.controlnets, load_component(tmp_path / "other")))
    save_components(both, tmp_path / "ours")
    same_components(both, read_components(tmp_path / "ours"))
    again = diffusers.StableDiffusionControlNetPipeline.from_pretrained(tmp_path / "ours")
    assert silence == []
    assert len(again.controlnet.nets) == 2
    assert same(again.controlnet.nets[1], other)


def test_an_image_encoder(tmp_path: Path, silence: list[str]) -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4
    )
    seer = tiny.randomised(CLIPVisionModelWithProjection(config))
    seer.save_pretrained(tmp_path / "seer")
    found = replace(read_components(tiny.saved("sd1")[1]), image_encoder=load_component(tmp_path / "seer"))
    save_components(found, tmp_path / "ours")
    same_components(found, read_components(tmp_path / "ours"))
    again = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "ours")
    assert silence == []
    assert same(again.image_encoder, seer)


def test_shared_embedders_are_written_for_every_block(tmp_path: Path) -> None:
    found = read_components(tiny.saved("dit")[1])
    blocks = found.network.transformer_blocks
    for block in blocks:  # type: ignore[union-attr]
        block.norm1["emb"] = blocks[0].norm1["emb"]  # type: ignore[index,union-attr]
    save_components(found, tmp_path / "dit")
    again = diffusers.DiTPipeline.from_pretrained(tmp_path / "dit").transformer
    assert same(found.network, again)


def test_one_component(tmp_path: Path, silence: list[str]) -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4
    )
    small = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )
    for network in (small, CLIPVisionModelWithProjection(config), tiny.controlnet(tiny.XL_UNET)):
        kind = type(network)
        tiny.randomised(network).save_pretrained(tmp_path / kind.__name__)
        save_component(load_component(tmp_path / kind.__name__), tmp_path / f"ours {kind.__name__}")
        again = kind.from_pretrained(tmp_path / f"ours {kind.__name__}")
        assert silence == []
        assert same(again, network)
        assert settings(again) == settings(network)


@pytest.mark.parametrize("name", sorted(tiny.FOLDERS))
def test_configs_hold_the_keys_of_their_class_alone(name: str) -> None:
    found = read_components(tiny.saved(name)[1])
    for network in (found.network, found.vae, *found.controlnets):
        if network is not None:
            written = config_of(network)
            known = inspect.signature(getattr(diffusers, written["_class_name"]).__init__).parameters
            assert {key for key in written if not key.startswith("_")} <= known.keys()


# Shards and dtypes


def test_shards_are_no_larger_than_asked(tmp_path: Path, silence: list[str]) -> None:
    pipe, folder = tiny.saved("sd1")
    found = read_components(folder)
    save_components(found, tmp_path / "ours", max_shard_bytes=200_000)
    unet = tmp_path / "ours" / "unet"
    shards = sorted(unet.glob("*.safetensors"))
    largest = max(t.nbytes for t in pipe.unet.state_dict().values())
    assert len(shards) > 2
    for shard in shards:
        assert sum(t.nbytes for t in load_file(shard).values()) <= max(200_000, largest)
    index = json.loads((unet / "diffusion_pytorch_model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in pipe.unet.state_dict().values())
    assert set(index["weight_map"]) == set(pipe.unet.state_dict())
    again = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "ours")
    assert silence == []
    assert same(again.unet, pipe.unet)
    assert same(again.text_encoder, pipe.text_encoder)
    same_components(found, read_components(tmp_path / "ours"))


def test_dtype(tmp_path: Path) -> None:
    found = read_components(tiny.saved("ddpm")[1])
    save_components(found, tmp_path / "half", dtype=torch.float16)
    again = read_components(tmp_path / "half").network
    assert {p.dtype for p in again.parameters()} == {torch.float16}
    assert torch.equal(again.conv_in.weight, found.network.conv_in.weight.half())
    assert found.network.conv_in.weight.dtype == torch.float32  # what is saved is not touched


# Whole or not at all


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_components(tiny.saved("sd1")[1])

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save, "write_tensors", full)
    with pytest.raises(PellucidError, match="No space left") as error:
        save_components(found, tmp_path / "ours")
    assert error.value.code == "save"
    assert list(tmp_path.iterdir()) == []


def test_an_old_folder_is_kept_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_components(tiny.saved("ddpm")[1])
    save_components(found, tmp_path / "ours")
    with pytest.raises(PellucidError, match=r"new or empty.*overwrite=True"):
        save_components(found, tmp_path / "ours")

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(save, "write_tensors", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_components(found, tmp_path / "ours", overwrite=True)
    same_components(found, read_components(tmp_path / "ours"))
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_model_can_replace_the_folder_that_it_is_mapped_from(tmp_path: Path) -> None:
    folder = tiny.copied("ddpm", tmp_path)
    found = read_components(folder)
    before = {k: t.clone() for k, t in found.network.state_dict().items()}
    (folder / "stale").touch()
    save_components(found, folder, overwrite=True)
    assert not (folder / "stale").exists()
    assert all(torch.equal(t, before[k]) for k, t in found.network.state_dict().items())
    same_components(found, read_components(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["ddpm"]


def test_only_models_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "diary.txt").write_text("dear", encoding="utf-8")
    found = read_components(tiny.saved("ddpm")[1])
    with pytest.raises(PellucidError, match=r"one that holds model_index\.json"):
        save_components(found, tmp_path / "home", overwrite=True)
    with pytest.raises(PellucidError, match="new or empty"):
        save_component(found.network, tmp_path / "home" / "diary.txt")
    assert (tmp_path / "home" / "diary.txt").read_text(encoding="utf-8") == "dear"


def test_an_empty_folder_and_new_parents_are_taken(tmp_path: Path) -> None:
    found = read_components(tiny.saved("ddpm")[1])
    (tmp_path / "empty").mkdir()
    umask = os.umask(0)
    os.umask(umask)
    for place in ("empty", "a/b/c"):
        save_components(found, tmp_path / place)
        assert (tmp_path / place).stat().st_mode & 0o777 == 0o777 & ~umask  # no private temporary folder
        same_components(found, read_components(tmp_path / place))


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    found = read_components(tiny.saved("controlnet")[1])
    with pytest.raises(PellucidError, match="pipeline_class must be a ControlNet pipeline"):
        save_components(replace(found, pipeline_class="StableDiffusionPipeline"), tmp_path / "x")
    with pytest.raises(PellucidError, match="network must be one of Pellucid's own"):
        save_component(nn.Linear(2, 2), tmp_path / "x")
    with pytest.raises(PellucidError, match="max_shard_bytes must be positive"):
        save_components(found, tmp_path / "x", max_shard_bytes=0)
    assert list(tmp_path.iterdir()) == []
