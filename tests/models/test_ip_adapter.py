"""IP-Adapters against diffusers': plain, full and Plus, from the layout of the original files, scales and masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.image_processor import IPAdapterMaskProcessor
from oracles import relative
from test_unet import CONFIGS, inputs_of, pair

from pellucid import PellucidError
from pellucid.models.ip_adapter import from_state, scale_at
from pellucid.models.unet import UNet

WIDTH, IMAGE, PATCHES = 24, 20, 5


def file_of(unet: UNet, kind: str, seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Random weights in the layout of the original files."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)

    if kind == "plain":
        image = {"proj.weight": rand(4 * WIDTH, IMAGE), "proj.bias": rand(4 * WIDTH)}
        image |= {"norm.weight": 1 + rand(WIDTH), "norm.bias": rand(WIDTH)}
    elif kind == "full":
        image = {"proj.0.weight": rand(IMAGE, IMAGE), "proj.0.bias": rand(IMAGE)}
        image |= {"proj.2.weight": rand(WIDTH, IMAGE), "proj.2.bias": rand(WIDTH)}
        image |= {"proj.3.weight": 1 + rand(WIDTH), "proj.3.bias": rand(WIDTH)}
    else:
        inner = 128  # two heads of 64
        image = {"latents": rand(1, 6, inner), "proj_in.weight": rand(inner, IMAGE), "proj_in.bias": rand(inner)}
        image |= {"proj_out.weight": rand(WIDTH, inner), "proj_out.bias": rand(WIDTH)}
        image |= {"norm_out.weight": 1 + rand(WIDTH), "norm_out.bias": rand(WIDTH)}
        for layer in range(4):
            at = f"layers.{layer}"
            for norm in ("norm1", "norm2"):
                image |= {f"{at}.0.{norm}.weight": 1 + rand(inner), f"{at}.0.{norm}.bias": rand(inner)}
            image |= {f"{at}.0.to_q.weight": rand(inner, inner), f"{at}.0.to_kv.weight": rand(2 * inner, inner)}
            image |= {f"{at}.0.to_out.weight": rand(inner, inner)}
            image |= {f"{at}.1.0.weight": 1 + rand(inner), f"{at}.1.0.bias": rand(inner)}
            image |= {f"{at}.1.1.weight": rand(4 * inner, inner), f"{at}.1.3.weight": rand(inner, 4 * inner)}
    pairs = {}
    for index, (block, _, _) in enumerate(unet.cross_attentions()):
        for name in ("to_k_ip", "to_v_ip"):
            pairs[f"{2 * index + 1}.{name}.weight"] = rand(block.attn2.to_q.out_features, WIDTH)
    return {"image_proj": image, "ip_adapter": pairs}


def flat(file: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{part}.{k}": v for part, held in file.items() for k, v in held.items()}


def states_of(kind: str, count: int = 1, seed: int = 3) -> torch.Tensor:
    shape = (2, count, IMAGE) if kind == "plain" else (2, count, PATCHES, IMAGE)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both(name: str, kind: str, files: int = 1) -> tuple[UNet, Any, list[Any]]:
    mine, peer = pair(CONFIGS[name])
    made = [file_of(mine, kind, seed) for seed in range(files)]
    peer._load_ip_adapter_weights(made)
    peer.eval()
    return mine, peer, [from_state(flat(f)).eval() for f in made]


def peer_call(peer: Any, given: dict[str, Any], states: list[torch.Tensor], **kwargs: Any) -> torch.Tensor:
    added = {"image_embeds": states}
    if "pooled" in given:
        added |= {"text_embeds": given["pooled"], "time_ids": given["sizes"]}
    with torch.no_grad():
        return peer(given["x"], given["time"], given["context"], added_cond_kwargs=added, **kwargs).sample


@pytest.mark.parametrize("kind", ["plain", "full", "plus"])
@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_equals_diffusers(name: str, kind: str) -> None:
    mine, peer, (adapter,) = both(name, kind)
    for processor in peer.attn_processors.values():
        if hasattr(processor, "scale"):
            processor.scale = [0.6]
    given, states = inputs_of(CONFIGS[name]), states_of(kind)
    with torch.no_grad():
        image = adapter.tokens(mine, states, scale=0.6)
        assert relative(mine(**given, image=image), peer_call(peer, given, [states])) < 1e-5
        assert adapter.wants == ("pooled" if kind == "plain" else "patches")


def test_two_adapters_equal_diffusers() -> None:
    mine, peer, adapters = both("sd1", "plain", files=2)
    for processor in peer.attn_processors.values():
        if hasattr(processor, "scale"):
            processor.scale = [0.6, 0.3]
    given, states = inputs_of(CONFIGS["sd1"]), [states_of("plain", seed=s) for s in (3, 4)]
    with torch.no_grad():
        made = [a.tokens(mine, s, scale=w) for a, s, w in zip(adapters, states, (0.6, 0.3), strict=True)]
        image = tuple(first + second for first, second in zip(*made, strict=True))
        assert relative(mine(**given, image=image), peer_call(peer, given, states)) < 1e-5


def test_masks_equal_diffusers() -> None:
    mine, peer, (adapter,) = both("sd1", "plain")
    given, states = inputs_of(CONFIGS["sd1"]), states_of("plain", count=2)
    masks = torch.zeros(2, 64, 64)
    masks[0, :, :32], masks[1, :, 32:] = 1.0, 1.0
    with torch.no_grad():
        image = adapter.tokens(mine, states, masks=masks, size=(8, 8))
        theirs = peer_call(peer, given, [states], cross_attention_kwargs={"ip_adapter_masks": [masks[None]]})
        assert relative(mine(**given, image=image), theirs) < 1e-5
    assert IPAdapterMaskProcessor.downsample(masks[:1], 1, 64, 1).shape == (1, 64, 1)  # the layout compared with


def test_scales_by_place() -> None:
    mine, _, (adapter,) = both("sd1", "plain")
    given, states = inputs_of(CONFIGS["sd1"]), states_of("plain")
    with torch.no_grad():
        plain = mine(**given)
        none = mine(**given, image=adapter.tokens(mine, states, scale={"nowhere": 1.0}))
        middle = mine(**given, image=adapter.tokens(mine, states, scale={"mid_block": 1.0}))
        everywhere = mine(**given, image=adapter.tokens(mine, states))
    assert torch.equal(plain, none)
    assert not torch.equal(plain, middle)
    assert not torch.equal(middle, everywhere)
    assert scale_at({"up_blocks": 0.5, "up_blocks.1": 0.0}, "up_blocks.1.attentions.0") == 0.0
    assert scale_at({"up_blocks.1": 1.0}, "up_blocks.10.attentions.0") == 0.0


def test_one_graph(count_graphs: Any) -> None:
    mine, _, (adapter,) = both("sd1", "plain")
    calls = []
    with torch.no_grad():
        for seed in range(2):
            given = inputs_of(CONFIGS["sd1"], seed=seed)
            image = adapter.tokens(mine, states_of("plain", seed=seed))
            calls.append(((given.pop("x"), given.pop("time")), {**given, "image": image}))
    assert count_graphs(mine, calls) == 1


def test_another_base_and_another_file_are_refused() -> None:
    mine, _, (adapter,) = both("sd1", "plain")
    other, _ = pair(CONFIGS["sdxl"])
    with pytest.raises(PellucidError) as error:
        adapter.tokens(other, states_of("plain"))
    assert error.value.code == "ip-base"
    for state, code in (
        ({"unet.conv_in.weight": torch.zeros(1)}, "ip-file"),
        (flat(file_of(mine, "plain")), "ip-kind"),
    ):
        broken = {k.replace("image_proj.proj", "image_proj.mystery"): v for k, v in state.items()}
        with pytest.raises(PellucidError) as error:
            from_state(broken)
        assert error.value.code == code
