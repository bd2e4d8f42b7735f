"""ControlNets against diffusers': alone, in a UNet, several at once, off at a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import ControlNetModel
from oracles import randomise, relative
from test_unet import CONFIGS, inputs_of, pair, theirs

from pellucid import PellucidError
from pellucid.models.controlnet import ControlledUNet, ControlNet
from pellucid.models.unet_config import read

LEFT_OUT = {"up_block_types", "sample_size", "out_channels", "reverse_transformer_layers_per_block"}


def control_raw(name: str, **change: Any) -> dict[str, Any]:
    raw = {k: v for k, v in CONFIGS[name].items() if k not in LEFT_OUT}
    small = {"conditioning_embedding_out_channels": [8, 12], "_class_name": "ControlNetModel"}
    return {**raw, **small, **change}


def control_pair(name: str, seed: int = 5, **change: Any) -> tuple[ControlNet, Any]:
    raw = control_raw(name, **change)
    peer = randomise(ControlNetModel.from_config({k: v for k, v in raw.items() if k != "_class_name"}), seed)
    mine = ControlNet(read(raw)).eval()
    mine.load_state_dict(peer.state_dict())
    return mine, peer


def given_with_image(name: str, seed: int = 0) -> tuple[dict[str, Any], torch.Tensor]:
    image = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed + 40))
    return inputs_of(CONFIGS[name], seed=seed), image  # two widths halve once: 16 pixels for 8 latents


def peer_residuals(peer: Any, given: dict[str, Any], image: torch.Tensor, scale: float) -> Any:
    rest = {}
    if "pooled" in given:
        rest["added_cond_kwargs"] = {"text_embeds": given["pooled"], "time_ids": given["sizes"]}
    with torch.no_grad():
        return peer(given["x"], given["time"], given["context"], image, scale, class_labels=given.get("labels"), **rest)


@pytest.mark.parametrize("change", [{}, {"controlnet_conditioning_channel_order": "bgr"}])
@pytest.mark.parametrize("name", ["sd1", "sd2", "sdxl", "labels"])
def test_residuals_equal_diffusers(name: str, change: dict[str, Any]) -> None:
    mine, peer = control_pair(name, **change)
    given, image = given_with_image(name)
    other = peer_residuals(peer, given, image, 0.7)
    with torch.no_grad():
        outs, middle = mine(hint=mine.hint(image, [0.7, 0.7]), **given)
    for out, theirs_out in zip(outs, other.down_block_res_samples, strict=True):
        assert relative(out, theirs_out) < 1e-5
    assert relative(middle, other.mid_block_res_sample) < 1e-5


def test_two_controlnets_in_a_unet_equal_diffusers() -> None:
    unet, peer_unet = pair(CONFIGS["sd1"])
    nets = [control_pair("sd1", seed) for seed in (5, 6)]
    given, image = given_with_image("sd1")
    down, mid = None, None
    for (_, peer), scale in zip(nets, (0.4, 1.2), strict=True):
        other = peer_residuals(peer, given, image, scale)
        pieces, middle = other.down_block_res_samples, other.mid_block_res_sample
        down = pieces if down is None else [a + b for a, b in zip(down, pieces, strict=True)]
        mid = middle if mid is None else mid + middle
    with torch.no_grad():
        expected = peer_unet(
            given["x"],
            given["time"],
            given["context"],
            down_block_additional_residuals=down,
            mid_block_additional_residual=mid,
        ).sample
        controlled = ControlledUNet(unet, [mine for mine, _ in nets])
        hints = tuple(mine.hint(image, [s, s]) for (mine, _), s in zip(nets, (0.4, 1.2), strict=True))
        assert relative(controlled(**given, control=hints), expected) < 1e-5
        first = controlled(**given, control=(hints[0], None))  # the second is off: as if it were not there
        assert torch.equal(first, ControlledUNet(unet, [nets[0][0]])(**given, control=hints[:1]))
        assert relative(controlled(**given), theirs(peer_unet, given)) < 1e-5


def test_a_scale_for_each_image() -> None:
    mine, _ = control_pair("sd1")
    unet, _ = pair(CONFIGS["sd1"])
    given, image = given_with_image("sd1")
    with torch.no_grad():
        mixed = ControlledUNet(unet, [mine])(**given, control=(mine.hint(image, [0.0, 0.9]),))
        off = unet(**given)
        on = ControlledUNet(unet, [mine])(**given, control=(mine.hint(image, [0.9, 0.9]),))
    assert torch.equal(mixed[0], off[0])
    assert torch.equal(mixed[1], on[1])


def test_one_graph_for_unet_and_controlnet(count_graphs: Any) -> None:
    mine, _ = control_pair("sd1")
    unet, _ = pair(CONFIGS["sd1"])
    calls = []
    with torch.no_grad():
        for seed in range(2):
            given, image = given_with_image("sd1", seed)
            hint = mine.hint(image, [1.0, 0.5])
            calls.append(((given.pop("x"), given.pop("time")), {**given, "control": (hint,)}))
        assert count_graphs(ControlledUNet(unet, [mine]), calls) == 1


def test_a_new_controlnet_adds_nothing() -> None:
    mine = ControlNet(read(control_raw("sd1"))).eval()
    given, image = given_with_image("sd1")
    with torch.no_grad():
        outs, middle = mine(hint=mine.hint(image, [1.0, 1.0]), **given)
    assert all(float(out.abs().max()) == 0.0 for out in (*outs, middle))


def test_a_controlnet_of_another_base_is_refused() -> None:
    unet, _ = pair(CONFIGS["sd1"])
    mine, _ = control_pair("sdxl")
    with pytest.raises(PellucidError) as error:
        ControlledUNet(unet, [mine])
    assert error.value.code == "config-length" or error.value.code == "control-base"
    with pytest.raises(PellucidError) as error:
        mine.hint(torch.zeros(1, 1, 16, 16), [1.0])
    assert error.value.code == "control-shape"
