"""Adapter files that are broken, dangerous, or for something else: one clear line each, and nothing is run."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_peers import (
    ATTN,
    applied,
    kohya,
    sd_networks,
    state,
    text_config,
    trained,
    underscored,
    unet_config,
    xl_networks,
)
from safetensors.torch import save_file
from torch import Tensor, nn

from pellucid.core.errors import PellucidError
from pellucid.interop import lora_file
from pellucid.models import lora
from pellucid.models.lora import AdapterSet
from pellucid.models.lora_delta import LoRA


@pytest.fixture(scope="module")
def sd() -> dict[str, nn.Module]:
    return sd_networks()


@pytest.fixture(scope="module")
def xl() -> dict[str, nn.Module]:
    return xl_networks()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """diffusers logs a warning where a file has nothing for a component."""
    logger = logging.getLogger("diffusers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def refused(path: Path, networks: dict[str, nn.Module]) -> PellucidError:
    with pytest.raises(PellucidError) as caught:
        lora_file.load(path, networks)
    assert "\n" not in str(caught.value)
    return caught.value


def saved_kohya(path: Path, networks: dict[str, nn.Module], **settings: Any) -> dict[str, Tensor]:
    tensors = kohya("lora_unet_", state(trained(networks["unet"], unet_config(**settings))), 2.0)
    if "text_encoder_2" in networks:
        tensors |= kohya("lora_te2_", state(trained(networks["text_encoder_2"], text_config())), 2.0)
    save_file(tensors, path)
    return tensors


def test_a_truncated_file(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    file = tmp_path / "style.safetensors"
    saved_kohya(file, sd)
    whole = file.read_bytes()
    for size in (len(whole) // 2, 40, 5, 0):
        file.write_bytes(whole[:size])
        assert "style.safetensors" in str(refused(file, sd))


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("trapped", "w"))


def test_a_pickle_with_code_is_refused_and_not_run(
    sd: dict[str, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"unet.a": Trap()}, "style.bin")
    Path("style.pt").write_bytes(pickle.dumps(Trap()))
    torch.save([torch.zeros(2), torch.zeros(2)], "list.pt")  # the first trainer's, without names
    for name in ("style.bin", "style.pt", "list.pt"):
        refused(tmp_path / name, sd)
    assert not Path("trapped").exists()


def test_files_that_are_not_there_or_not_alone(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    assert refused(tmp_path / "none.safetensors", sd).code == "lora-file"
    assert "got 'none'" in str(refused(tmp_path, sd))
    for name in ("a", "b"):
        saved_kohya(tmp_path / f"{name}.safetensors", sd, target_modules=["to_q"])
    assert "got 'a.safetensors, b.safetensors'" in str(refused(tmp_path, sd))


def test_unknown_keys_only(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    file = tmp_path / "style.safetensors"
    save_file({"lora_unet_double_blocks_0_img.lora_down.weight": torch.zeros(1), "x.weight": torch.zeros(1)}, file)
    error = refused(file, sd)
    assert error.code == "lora-nothing"
    assert "double_blocks_0_img" in str(error)
    assert "adapter style must be one with keys for layers of unet, text_encoder" in str(error)
    save_file({"lora_te2_x.alpha": torch.ones(1)}, file)
    assert str(refused(file, sd)).endswith("It is for SDXL.")
    save_file({f"unet.{ATTN}.to_q.alpha": torch.ones(1)}, file)  # a layer that is there, and nothing to add to it
    assert refused(file, sd).code == "lora-nothing"


def test_tokens_alone_are_a_textual_inversion(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    save_file({"clip_l": torch.ones(2, 8)}, tmp_path / "style.safetensors")
    error = refused(tmp_path / "style.safetensors", sd)
    assert error.code == "lora-nothing"
    assert "inversions=" in str(error)


def test_tokens_are_not_lost_in_saving(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    tensors = saved_kohya(tmp_path / "style.safetensors", sd)
    save_file({**tensors, "<s1>": torch.ones(8)}, tmp_path / "style.safetensors")
    found = lora_file.load(tmp_path / "style.safetensors", sd)
    assert set(found.tokens) == {"<s1>"}
    assert found.unused == ()
    with pytest.raises(PellucidError, match="must be one without tokens; got '<s1>'") as caught:
        lora_file.save(found, tmp_path / "again.safetensors")
    assert caught.value.code == "lora-save"


def test_some_unknown_keys_are_named(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    file = tmp_path / "style.safetensors"
    tensors = saved_kohya(file, sd, target_modules=["to_q"])
    more = {"lora_unet_nowhere.alpha": torch.ones(1), f"unet.{ATTN}.to_k.oft_blocks": torch.ones(1)}
    save_file(tensors | more, file)
    _, receipt = applied(file, sd)
    assert set(receipt.unused) == set(more)
    assert set(receipt.read) == set(tensors)


def test_another_base_is_named_with_layer_and_shapes(
    sd: dict[str, nn.Module], xl: dict[str, nn.Module], tmp_path: Path
) -> None:
    saved_kohya(tmp_path / "xl.safetensors", xl)
    error = refused(tmp_path / "xl.safetensors", sd)
    assert error.code == "lora-base"
    layer = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
    assert f"{layer} of adapter xl must be (16, 10) as in the base; got (16, 24)." in str(error)
    saved_kohya(tmp_path / "sd.safetensors", sd, target_modules=["to_k"])
    assert "must be (16, 24) as in the base; got (16, 10)" in str(refused(tmp_path / "sd.safetensors", xl))


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ({"lora_down.weight": (2, 16)}, "lora-incomplete"),
        ({"lora_up.weight": (16, 2)}, "lora-incomplete"),
        ({"hada_w1_a": (16, 2), "hada_w1_b": (2, 16)}, "lora-incomplete"),
        ({"lokr_w1": (4, 4)}, "lora-incomplete"),
        ({"lora_down.weight": (3, 16), "lora_up.weight": (16, 2)}, "lora-shape"),
        ({"lora_down.weight": (16,), "lora_up.weight": (16,)}, "lora-shape"),
        ({"lora_down.weight": (), "lora_up.weight": ()}, "lora-shape"),
        ({"lora_down.weight": (2, 16), "lora_up.weight": (16, 2), "alpha": (2,)}, "lora-shape"),
        ({"lora_down.weight": (2, 16), "lora_up.weight": (16, 2), "dora_scale": (7, 1)}, "lora-base"),
        ({"hada_w1_a": (16, 2), "hada_w1_b": (2, 16), "hada_w2_a": (16, 2), "hada_w2_b": (2, 8)}, "lora-shape"),
        ({"lokr_w1": (4, 4), "lokr_w2": (4,)}, "lora-shape"),
        ({"lokr_w1": (4, 4), "lokr_w2": (4, 5)}, "lora-base"),
        ({"diff": ()}, "lora-base"),
    ],
)  # fmt: skip
def test_broken_layers_are_named(
    sd: dict[str, nn.Module], tmp_path: Path, parts: dict[str, tuple[int, ...]], code: str
) -> None:
    name = f"lora_unet_{underscored(ATTN)}_to_q"
    save_file({f"{name}.{end}": torch.ones(shape) for end, shape in parts.items()}, tmp_path / "style.safetensors")
    error = refused(tmp_path / "style.safetensors", sd)
    assert error.code == code
    assert f"{ATTN}.to_q of adapter style" in str(error)


@pytest.mark.parametrize(
    "metadata",
    ["{", "[]", '{"unet.lora_alpha": "much"}', '{"unet.lora_alpha": 1, "unet.alpha_pattern": {"(": 1}}',
     '{"unet.lora_alpha": 1, "unet.alpha_pattern": [1]}'],
)  # fmt: skip
def test_broken_metadata(sd: dict[str, nn.Module], tmp_path: Path, metadata: str) -> None:
    tensors = state(trained(sd["unet"], unet_config(target_modules=["to_q"])))
    tensors = {f"unet.{key}": tensor for key, tensor in tensors.items()}
    save_file(tensors, tmp_path / "style.safetensors", {"lora_adapter_metadata": metadata})
    assert refused(tmp_path / "style.safetensors", sd).code == "lora-config"


def test_a_file_of_zeros_is_read_but_not_applied(sd: dict[str, nn.Module], tmp_path: Path) -> None:
    tensors = state(trained(sd["unet"], unet_config(init_lora_weights=True)))  # as PEFT begins: B is zero
    save_file({f"unet.{key}": tensor for key, tensor in tensors.items()}, tmp_path / "style.safetensors")
    adapters = lora_file.load(tmp_path / "style.safetensors", sd)
    assert isinstance(adapters, AdapterSet)
    assert all(isinstance(delta, LoRA) for delta in adapters.layers.values())
    with pytest.raises(PellucidError, match="adapter style must change a layer") as caught:
        lora.apply_all(sd, [(adapters, 1.0)])
    assert caught.value.code == "lora-nothing"
