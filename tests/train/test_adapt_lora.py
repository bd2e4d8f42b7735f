"""LoRA training: the file that comes out says, here and in diffusers, what the trained network said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adapt_cases as cases
import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file
from torch import Tensor

import pellucid
from pellucid import Lora
from pellucid.models import lora
from pellucid.pipeline.encoders.text import encode_prompts
from pellucid.train.lora import ATTENTION, FILE, LoraConfig, LoraNetwork, LowRankUpdate, chosen_layers

STRONG = 4.0  # so that a product of two small matrices is seen beside the base
SMALL = {"width": 16, "height": 16, "steps": 3, "seed": 1, "guidance": 3.0}


def question() -> dict[str, Tensor]:
    return {"x": cases.drawn(2, 4, 8, 8) * 2 - 1, "time": torch.tensor([3.0, 700.0])}


def said(task: Any, words: list[str], network: Any = None) -> Tensor:
    """What a trained network says of a fixed x."""
    masks = {"text": torch.zeros(len(words), dtype=torch.bool)}
    batch = cases.rows(cases.examples(), torch.arange(len(words)))
    batch = type(batch)(batch.images, None, tuple(words), {})
    told = task.all_inputs(batch, masks, None, torch.Size((len(words), 4, 8, 8)))
    with torch.no_grad():
        return (network or task.network)(**question(), **told)


CASES = [
    ("sd1", {}),
    ("sd1", {"alpha": 1.0, "text_layers": ("*.q_proj", "*.fc1")}),
    ("sd1", {"layers": ("conv_in", "*.resnets.*.conv1", "*.downsamplers.0.conv", "*.proj_out", "mid_block.*.ff.*")}),
    ("sd2", {"alpha": 8.0}),
    ("xl", {"text_layers": ("*.self_attn.*",)}),
    ("pixart", {}),
]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_the_saved_file_says_what_the_network_said(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    base = cases.pixart() if name == "pixart" else cases.base(name)
    task = cases.task("lora", base=base, **changes)
    cases.randomised(task.network, STRONG)
    words = ["abc", "bad dab"]
    wanted = said(task, words)
    pipe = pellucid.load(base)
    adapters = pipe.load_lora(cases.saved(task, tmp_path / "style"))
    assert not adapters.unused
    assert len(adapters.keys) == len(task.network.state_dict())
    views, receipt = lora.apply_all(pipe.networks(), [(adapters, 1.0)])
    assert len(receipt.change) == len(adapters.layers)
    encoders = [view for part, view in views.items() if part.startswith("text_encoder")]
    told = encode_prompts(encoders, pipe.components.tokenizers, words)
    more = {"pooled": told.pooled, **task.base.sizes(2, 16, 16)} if told.pooled is not None else {}
    with torch.no_grad():
        found = views["transformer" if name == "pixart" else "unet"](**question(), context=told.context, **more)
        plain = pipe.components.network(**question(), context=told.context, **more)
    assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()  # merged weights round otherwise than a side path
    assert (plain - wanted).abs().max() > 1e-2 * wanted.abs().max()


def test_diffusers_makes_the_image_that_our_pipeline_makes(tmp_path: Path) -> None:
    task = cases.task("lora", alpha=2.0, text_layers=("*.q_proj", "*.out_proj"))
    cases.randomised(task.network, STRONG)
    folder = cases.saved(task, tmp_path / "style")
    made = pellucid.load(cases.base())("abc", loras=[Lora(folder)], decode=False, **SMALL)
    plain = pellucid.load(cases.base())("abc", decode=False, **SMALL)
    peer = tiny.stable_diffusion(tmp_path / "peer").__class__.from_pretrained(cases.base())
    peer.set_progress_bar_config(disable=True)
    peer.load_lora_weights(folder)
    theirs = peer(
        "abc", width=16, height=16, num_inference_steps=3, guidance_scale=3.0, output_type="latent",
        generator=torch.Generator().manual_seed(1),
    ).images  # fmt: skip
    assert (made.latents - theirs).abs().max() < 1e-4 * theirs.abs().max()
    assert (plain.latents - theirs).abs().max() > 1e-3 * theirs.abs().max()


def test_the_file_may_be_half_as_large(tmp_path: Path) -> None:
    task = cases.task("lora", alpha=3.0, saved_dtype="float16")
    cases.randomised(task.network)
    held = load_file(cases.saved(task, tmp_path / "half") / FILE)
    assert {tensor.dtype for tensor in held.values()} == {torch.float16}
    wanted = dict(task.network.named_parameters())
    name = "mid_block.attentions.0.transformer_blocks.0.attn2.to_v"
    up = wanted["changes.unet/" + name.replace(".", "/") + ".up.weight"]
    assert torch.equal(held[f"unet.{name}.lora_B.weight"], (up * 0.75).half())


def test_the_mean_of_the_weights_is_what_is_saved(tmp_path: Path) -> None:
    """The trainer hands over the same module with other weights in it, or a copy."""
    import copy

    task = cases.task("lora")
    twin = cases.randomised(copy.deepcopy(task.network))
    task.save(twin, tmp_path / "mean")
    task.save(task.network, tmp_path / "last")
    mean, last = (load_file(tmp_path / name / FILE) for name in ("mean", "last"))
    assert mean.keys() == last.keys()
    assert all(float(t.abs().sum()) == 0 for name, t in last.items() if "lora_B" in name)
    assert all(float(t.abs().sum()) > 0 for name, t in mean.items() if "lora_B" in name)


def test_layers_are_those_that_fit() -> None:
    unet = pellucid.load(cases.base()).components.network
    names = list(chosen_layers(unet, ATTENTION, "layers"))
    attentions = [n for n, m in unet.named_modules() if n.endswith((".attn1", ".attn2"))]
    assert len(names) == 4 * len(attentions)
    assert all(name.rpartition(".to_")[0] in attentions for name in names)
    assert set(chosen_layers(unet, ("*.attn2.to_v",), "layers")) == {f"{n}.to_v" for n in attentions if "attn2" in n}


def test_matrices_start_at_no_change_and_of_the_rank() -> None:
    network = cases.task("lora").network
    assert isinstance(network, LoraNetwork)
    for change in network.changes.values():
        assert isinstance(change, LowRankUpdate)
        assert change.up.weight.abs().sum() == 0
        assert change.down.weight.abs().sum() > 0
        assert change.down.weight.shape[0] == change.up.weight.shape[1] == 4


def test_text_lora_trains_the_encoder(tmp_path: Path) -> None:
    """Dropped captions become the empty one, which the trained encoder also encodes."""
    task = cases.task("text_lora")
    cases.randomised(task.network)
    first, second = said(task, ["abc", "abc"]), said(task, ["abc", ""])
    asked = task.base.asked_tokens(["abc", "abc"], torch.tensor([False, True]))
    with torch.no_grad():
        found = task.network(**question(), tokens=asked)
    assert torch.equal(found, second)
    assert torch.allclose(first[0], second[0], atol=1e-5)
    assert not torch.allclose(first[1], second[1], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"rank": 0}, "config-value"),
        ({"alpha": 0.0}, "config-value"),
        ({"layers": ()}, "lora-layers"),
        ({"layers": ("*.to_w",)}, "lora-layers"),
        ({"layers": (*ATTENTION, "*.norm1")}, "lora-layers"),  # a norm has no matrix
        ({"text_layers": ("*.to_q",)}, "lora-layers"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], code: str) -> None:
    assert cases.refusal(lambda: LoraConfig(base=cases.base(), **changes).build(0, cases.CPU)) == code
