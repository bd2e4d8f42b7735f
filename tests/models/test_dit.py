"""DiT and PixArt: diffusers' weights and outputs, one graph for a whole run, and the laws of skipped and perturbed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import DiTTransformer2DModel, PixArtTransformer2DModel, Transformer2DModel
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from pellucid.core.errors import PellucidError
from pellucid.models import ops
from pellucid.models.dit import DiT, DiTConfig, PixArt, PixArtConfig, build, read

TINY = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 3}
LEGACY = {
    **TINY,
    "in_channels": 4,
    "out_channels": 8,
    "patch_size": 2,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 10,
    "norm_elementwise_affine": False,
}
TIMES = torch.tensor([0.0, 999.0, 261.37])

CLASS_CONDITIONAL = {
    "square": {**TINY, "sample_size": 8, "num_embeds_ada_norm": 10},
    "variance": {**TINY, "sample_size": 8, "out_channels": 8, "num_embeds_ada_norm": 7},
    "patches of 4": {**TINY, "sample_size": 16, "patch_size": 4, "in_channels": 3, "attention_bias": False},
}
TEXT = {
    "projected captions": {**TINY, "sample_size": 8, "caption_channels": 32, "cross_attention_dim": 24},
    "plain captions": {**TINY, "sample_size": 8, "cross_attention_dim": 32},
    "finer positions": {
        **TINY,
        "sample_size": 8,
        "cross_attention_dim": 32,
        "interpolation_scale": 2,
        "norm_eps": 1e-5,
    },
    "sizes asked for": {**TINY, "sample_size": 8, "cross_attention_dim": 32, "use_additional_conditions": True},
    "sizes by default": {**TINY, "sample_size": 128, "caption_channels": 32, "cross_attention_dim": 24},
    "sizes refused": {**TINY, "sample_size": 128, "cross_attention_dim": 32, "use_additional_conditions": False},
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def twin(oracle: torch.nn.Module) -> DiT | PixArt:
    """Our network for an oracle's config; it holds the oracle's own tensors."""
    ours = build(read({"_class_name": type(oracle).__name__, **oracle.config}))
    ours.load_state_dict(oracle.state_dict(), assign=True)
    return ours.eval()


def tiny(kind: type[torch.nn.Module], **config: Any) -> torch.nn.Module:
    return kind(**config).eval()


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def class_inputs(config: Any, rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(3, config.in_channels, rows, cols)
    return x, TIMES, torch.tensor([0, config.num_embeds_ada_norm, config.num_embeds_ada_norm - 1])


def text_inputs(config: PixArtConfig, rows: int, cols: int) -> dict[str, Any]:
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0]])
    return {
        "x": torch.randn(3, config.in_channels, rows, cols),
        "time": TIMES,
        "context": torch.randn(3, 5, 32),
        "context_mask": mask,
        "sizes": torch.tensor([[512.0, 768, 0.66], [1024, 1024, 1], [64, 8, 8]]) if config.takes_sizes else None,
    }


def ask(oracle: torch.nn.Module, x: Tensor, time: Tensor, context: Tensor, context_mask: Any, sizes: Any) -> Tensor:
    """What diffusers' PixArt answers to our inputs."""
    told = None if sizes is None else {"resolution": sizes[:, :2], "aspect_ratio": sizes[:, 2:]}
    return oracle(x, context, time, added_cond_kwargs=told, encoder_attention_mask=context_mask, return_dict=False)[0]


def tiny_dit(**config: Any) -> DiT:
    return DiT(DiTConfig(**TINY, **{"sample_size": 8, "num_embeds_ada_norm": 10, **config})).eval()


def tiny_pixart(**config: Any) -> PixArt:
    return PixArt(PixArtConfig(**TINY, **{"sample_size": 8, "cross_attention_dim": 32, **config})).eval()


# Parity with diffusers


@pytest.mark.parametrize("name", CLASS_CONDITIONAL)
@torch.inference_mode()
def test_dit_is_diffusers(name: str) -> None:
    oracle = tiny(DiTTransformer2DModel, **CLASS_CONDITIONAL[name])
    ours = twin(oracle)
    assert isinstance(ours, DiT)
    assert ours.state_dict().keys() == oracle.state_dict().keys()
    for side in (ours.config.sample_size, 2 * ours.config.sample_size, ours.config.sample_size // 2):
        x, time, labels = class_inputs(ours.config, side, side)
        assert error(ours(x, time, labels=labels), oracle(x, time, labels).sample) <= 1e-5


@torch.inference_mode()
def test_dit_of_a_wide_image_is_diffusers_before_it_is_folded() -> None:
    """diffusers folds tokens into a square whatever came in: its 4 · 4 fold of 2 · 8 tokens, undone, is our answer."""
    oracle = tiny(DiTTransformer2DModel, **CLASS_CONDITIONAL["square"])
    x, time, labels = class_inputs(oracle.config, 4, 16)
    square = oracle(x, time, labels).sample  # (3, 4, 8, 8)
    patches = F.unfold(square, 2, stride=2)  # (3, C · 4, 16)
    expected = F.fold(patches, (4, 16), 2, stride=2)
    assert error(twin(oracle)(x, time, labels=labels), expected) <= 1e-5


@pytest.mark.parametrize("name", TEXT)
@torch.inference_mode()
def test_pixart_is_diffusers(name: str) -> None:
    oracle = tiny(PixArtTransformer2DModel, **TEXT[name])
    ours = twin(oracle)
    assert isinstance(ours, PixArt)
    assert ours.state_dict().keys() == oracle.state_dict().keys()
    for rows, cols in ((8, 8), (4, 10), (16, 6)):
        inputs = text_inputs(ours.config, rows, cols)
        assert error(ours(**inputs), ask(oracle, **inputs)) <= 1e-5
        inputs["context_mask"] = None
        assert error(ours(**inputs), ask(oracle, **inputs)) <= 1e-5


@torch.inference_mode()
def test_a_text_without_a_token_seen_is_diffusers() -> None:
    """There the -10000 that both add to all logits rounds them to steps of 1e-3, and the steps may fall apart."""
    oracle = tiny(PixArtTransformer2DModel, **TEXT["plain captions"])
    inputs = text_inputs(read(oracle.config), 8, 8)
    inputs["context_mask"] = torch.zeros(3, 5)
    assert error(twin(oracle)(**inputs), ask(oracle, **inputs)) <= 1e-3


@torch.inference_mode()
def test_weights_saved_as_transformer_2d_load() -> None:
    oracle = tiny(Transformer2DModel, **LEGACY, sample_size=8, norm_type="ada_norm_zero")
    ours = twin(oracle)
    assert ours.state_dict().keys() == oracle.state_dict().keys()
    x, time, labels = class_inputs(ours.config, 8, 8)
    expected = oracle(x, timestep=time, class_labels=labels, return_dict=False)[0]
    assert error(ours(x, time, labels=labels), expected) <= 1e-5

    text = {"sample_size": 128, "norm_type": "ada_norm_single", "cross_attention_dim": 24, "caption_channels": 32}
    oracle = tiny(Transformer2DModel, **LEGACY, **text)
    ours = twin(oracle)
    assert ours.state_dict().keys() == oracle.state_dict().keys()
    inputs = text_inputs(ours.config, 4, 10)
    assert error(ours(**inputs), ask(oracle, **inputs)) <= 1e-5


@torch.inference_mode()
def test_half_precision_is_as_close_as_diffusers() -> None:
    exact = tiny(PixArtTransformer2DModel, **TEXT["sizes by default"])
    inputs = text_inputs(read(exact.config), 8, 8)
    expected = ask(exact, **inputs)
    half = {k: v.bfloat16() if k in ("x", "context") else v for k, v in inputs.items()}
    theirs = exact.bfloat16()
    ours = twin(theirs)(**half)
    assert ours.dtype == torch.bfloat16
    assert error(ours, expected) <= 1.5 * error(ask(theirs, **half), expected)


@pytest.mark.slow
@torch.inference_mode()
def test_dit_xl_2_is_diffusers() -> None:
    oracle = tiny(DiTTransformer2DModel, out_channels=8)
    with torch.device("meta"):
        ours = DiT(DiTConfig(out_channels=8)).eval()
    ours.load_state_dict(oracle.state_dict(), assign=True)  # the same tensors: 2.9 GB once
    x, time, labels = class_inputs(ours.config, 8, 8)
    assert error(ours(x, time, labels=labels), oracle(x, time, labels).sample) <= 1e-5


def test_gradients_are_diffusers() -> None:
    oracle = tiny(DiTTransformer2DModel, **CLASS_CONDITIONAL["variance"])
    ours = DiT(read({"_class_name": "DiTTransformer2DModel", **oracle.config})).eval()
    ours.load_state_dict(oracle.state_dict())
    x, time, labels = class_inputs(ours.config, 8, 8)
    ours(x, time, labels=labels).square().mean().backward()
    oracle(x, time, labels).sample.square().mean().backward()
    theirs = dict(oracle.named_parameters())
    for name, weight in ours.named_parameters():
        assert torch.allclose(weight.grad, theirs[name].grad, rtol=1e-3, atol=1e-6), name  # float32 sums in two orders


# Laws


@torch.inference_mode()
def test_a_lone_time_is_every_images_time() -> None:
    net = tiny_dit()
    x, labels = torch.randn(2, 4, 8, 8), torch.tensor([1, 10])
    many = net(x, torch.tensor([5.5, 5.5]), labels=labels)
    assert error(net(x, torch.tensor(5.5), labels=labels), many) <= 1e-5
    assert error(net(x, torch.tensor([5.5]), labels=labels), many) <= 1e-5


@torch.inference_mode()
def test_images_of_a_batch_do_not_see_each_other() -> None:
    net = tiny_pixart(use_additional_conditions=True)
    inputs = text_inputs(net.config, 8, 4)
    whole = net(**inputs)
    for i in range(3):
        assert error(net(**{k: v[i : i + 1] for k, v in inputs.items()}), whole[i : i + 1]) <= 1e-5


@torch.inference_mode()
def test_a_masked_token_has_no_effect_and_a_seen_one_has() -> None:
    net = tiny_pixart()
    inputs = text_inputs(net.config, 8, 8)
    inputs["context_mask"] = torch.tensor([[True, True, False, True, True]] * 3)
    before = net(**inputs)
    inputs["context"][:, 2] = 1e3
    assert torch.equal(net(**inputs), before)
    inputs["context"][:, 3] = 1e3
    assert error(net(**inputs), before) > 1e-3


def ends_of(net: Any, x: Tensor, time: Tensor, **told: Any) -> Tensor:
    """The same network without its blocks but one, whose gates are shut."""
    index = {"perturbed": (), "skipped": tuple(range(1, net.config.num_layers))}
    block = net.transformer_blocks[0]
    width = net.config.width
    if isinstance(net, DiT):
        for parameter in (block.norm1["linear"].weight, block.norm1["linear"].bias):
            parameter.view(6, width, -1)[[2, 5]] = 0.0
    else:
        for parameter in (net.adaln_single["linear"].weight, net.adaln_single["linear"].bias):
            parameter.view(6, width, -1)[[2, 5]] = 0.0
        block.scale_shift_table[[2, 5]] = 0.0
        block.attn2.to_out[0].weight.zero_()
        block.attn2.to_out[0].bias.zero_()
    return net(x, time, **told, **index)


@torch.inference_mode()
def test_skipping_every_block_leaves_the_ends() -> None:
    net = tiny_dit(out_channels=8)
    x, time, labels = class_inputs(net.config, 8, 8)
    skipped = net(x, time, labels=labels, skipped=(0, 1, 2))
    assert error(skipped, net(x, time, labels=labels)) > 1e-3
    assert error(skipped, ends_of(net, x, time, labels=labels)) <= 1e-6

    net = tiny_pixart()
    inputs = text_inputs(net.config, 8, 8)
    skipped = net(**inputs, skipped=(0, 1, 2))
    assert error(skipped, net(**inputs)) > 1e-3
    assert error(skipped, ends_of(net, **inputs)) <= 1e-6


@torch.inference_mode()
def test_skipping_a_block_is_a_network_without_it() -> None:
    """Of the last block; the first one's embedder also feeds the output."""
    net = tiny_dit()
    x, time, labels = class_inputs(net.config, 8, 8)
    short = DiT(DiTConfig(**{**TINY, "num_layers": 2}, sample_size=8, num_embeds_ada_norm=10)).eval()
    short.load_state_dict({k: v for k, v in net.state_dict().items() if "blocks.2." not in k})
    assert torch.equal(net(x, time, labels=labels, skipped=(2,)), short(x, time, labels=labels))


@torch.inference_mode()
def test_perturbed_attention_is_the_identity_map() -> None:
    """Against a block written by hand, where each token sees its own value alone."""
    net = tiny_dit()
    block = net.transformer_blocks[1]
    x, modulation = torch.randn(2, 16, 24), torch.randn(2, 6, 24)
    shift, scale, gate, shift2, scale2, gate2 = (m[:, None] for m in modulation.unbind(1))
    h = F.layer_norm(x, (24,), eps=1e-6) * (1 + scale) + shift
    weight, bias = block.attn1.to_v.weight, block.attn1.to_v.bias
    y = x + gate * block.attn1.to_out[0](h @ weight.T + bias)
    expected = y + gate2 * block.ff(F.layer_norm(y, (24,), eps=1e-5) * (1 + scale2) + shift2)
    given = x, None, modulation.flatten(1)
    for identity in (True, False):
        stream, update = block(*given, identity=identity)
        assert (error(ops.residual(stream, update), expected) <= 1e-6) is identity


@torch.inference_mode()
def test_perturbed_blocks_are_those_that_are_named() -> None:
    net = tiny_dit()
    x, time, labels = class_inputs(net.config, 8, 8)
    normal = net(x, time, labels=labels)
    assert torch.equal(net(x, time, labels=labels, perturbed=()), normal)
    outputs = [net(x, time, labels=labels, perturbed=p) for p in ((0,), (1,), (0, 1))]
    assert min(error(a, b) for a in outputs for b in (normal, *outputs) if a is not b) > 1e-4
    # a perturbed block that is skipped is skipped
    one = net(x, time, labels=labels, perturbed=(1,), skipped=(1,))
    assert torch.equal(one, net(x, time, labels=labels, skipped=(1,)))
    # with one token, attention is the identity already
    x, time, labels = class_inputs(net.config, 2, 2)
    assert error(net(x, time, labels=labels, perturbed=(0, 1, 2)), net(x, time, labels=labels)) <= 1e-6


@torch.inference_mode()
def test_equal_embedders_are_shared_without_effect_on_the_output() -> None:
    net = tiny_dit()
    x, time, labels = class_inputs(net.config, 8, 8)
    assert not net.share_embedders()
    first = net.transformer_blocks[0].norm1["emb"].state_dict()
    for block in net.transformer_blocks:
        block.norm1["emb"].load_state_dict(first)
    before, names = net(x, time, labels=labels), list(net.state_dict())
    count = sum(p.numel() for p in net.parameters())
    assert net.share_embedders()
    assert torch.equal(net(x, time, labels=labels), before)
    assert list(net.state_dict()) == names
    assert count - sum(p.numel() for p in net.parameters()) == 2 * sum(v.numel() for v in first.values())


# Compilation


def test_dit_is_one_graph_over_times_and_labels() -> None:
    counter = CompileCounter()
    net = tiny_dit()
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for time in (0.0, 999.0, 3.25):
        x = torch.randn(2, 4, 8, 8)
        labels = torch.tensor([int(time) % 10, 10])
        with torch.no_grad():
            out = compiled(x, torch.full((2,), time), labels=labels, perturbed=(1,), skipped=(2,))
            assert torch.equal(out, net(x, torch.full((2,), time), labels=labels, perturbed=(1,), skipped=(2,)))
    assert counter.frame_count == 1


def test_pixart_is_one_graph_over_times_and_prompts() -> None:
    counter = CompileCounter()
    net = tiny_pixart(use_additional_conditions=True)
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for time in (0.0, 999.0, 3.25):
        inputs = {**text_inputs(net.config, 4, 6), "time": torch.full((3,), time)}
        with torch.no_grad():
            assert torch.equal(compiled(**inputs), net(**inputs))
    assert counter.frame_count == 1


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3, 8, 8)}, r"the shape of x must be \(batch, 4, height, width\)"),
        ({"x": torch.zeros(2, 4, 7, 8)}, r"multiples of 2; got \(2, 4, 7, 8\)"),
        ({"x": torch.zeros(4, 8, 8)}, "the shape of x"),
        ({"time": torch.zeros(3)}, r"the shape of time must be \(2,\); got \(3,\)"),
        ({"time": torch.zeros(2, 1)}, "the shape of time"),
        ({"labels": None}, "labels must be one integer an image; got nothing. The label 10 means no class."),
        ({"labels": torch.zeros(2)}, "labels must be one integer an image; got torch.float32"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"the shape of labels must be \(2,\)"),
        ({"perturbed": (3,)}, r"perturbed must be block indices from 0 to 2; got \(3,\)"),
        ({"skipped": (-1,)}, "skipped must be block indices"),
    ],
)
def test_dit_refuses(change: dict[str, Any], message: str) -> None:
    inputs = {"x": torch.zeros(2, 4, 8, 8), "time": torch.zeros(2), "labels": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(PellucidError, match=message) as caught:
        tiny_dit()(**{**inputs, **change})
    assert caught.value.code == "network-input"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": None}, r"the shape of context must be \(3, tokens, 32\); got nothing"),
        ({"context": torch.zeros(3, 5, 31)}, r"got \(3, 5, 31\)"),
        ({"context": torch.zeros(2, 5, 32)}, r"got \(2, 5, 32\)"),
        ({"context_mask": torch.ones(3, 4)}, r"the shape of context_mask must be \(3, 5\); got \(3, 4\)"),
        ({"sizes": None}, r"the shape of sizes must be \(3, 3\): height, width, height / width; got nothing"),
        ({"sizes": torch.zeros(3, 6)}, r"the shape of sizes must be \(3, 3\)"),
    ],
)
def test_pixart_refuses(change: dict[str, Any], message: str) -> None:
    net = tiny_pixart(use_additional_conditions=True)
    with pytest.raises(PellucidError, match=message):
        net(**{**text_inputs(net.config, 8, 8), **change})


def test_sizes_are_refused_where_they_would_be_ignored() -> None:
    net = tiny_pixart()
    with pytest.raises(PellucidError, match=r"the shape of sizes must be None; got \(3, 3\)"):
        net(**{**text_inputs(net.config, 8, 8), "sizes": torch.zeros(3, 3)})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"_class_name": "Transformer2DModel"}, "norm_type of Transformer2DModel must be ada_norm_zero or"),
        ({**LEGACY, "_class_name": "Transformer2DModel", "norm_type": "ada_norm"}, "got 'ada_norm'"),
        ({"activation_fn": "geglu"}, "activation_fn of DiTConfig must be 'gelu-approximate'; got 'geglu'"),
        ({"norm_elementwise_affine": True}, "norm_elementwise_affine of DiTConfig must be False"),
        ({"patchsize": 4}, "patchsize of DiTConfig must be a known config key; got 4. Nearest: patch_size"),
        ({"num_attention_heads": 3, "attention_head_dim": 3}, "must be a multiple of 4; got 9"),
        ({"num_layers": 0}, "num_layers of DiTConfig must be a whole number from 1 to 1000; got 0"),
        (
            {"norm_type": "ada_norm_single", "cross_attention_dim": None},
            "cross_attention_dim of PixArtConfig must be",
        ),
        ({"norm_type": "ada_norm_single", "attention_head_dim": 8, "caption_channels": 9}, "must be 128; got 1152"),
        ({"norm_type": "ada_norm_single", "attention_head_dim": 8}, "must be a multiple of 3; got 128"),
    ],
)
def test_configs_refuse(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(PellucidError, match=message):
        read(raw)


def test_a_transformer_2d_config_has_the_defaults_of_its_class() -> None:
    raw = {k: v for k, v in LEGACY.items() if k not in ("attention_bias", "num_layers")}
    config = read({**raw, "_class_name": "Transformer2DModel", "norm_type": "ada_norm_zero", "sample_size": 8})
    assert (config.attention_bias, config.num_layers, config.norm_eps) == (False, 1, 1e-5)


@pytest.mark.parametrize("values", [{"num_layers": -1}, {"sample_size": "x"}, {"num_attention_heads": 0}])
def test_a_config_made_in_python_has_the_bounds_of_one_that_is_read(values: dict[str, Any]) -> None:
    with pytest.raises(PellucidError, match=f"{next(iter(values))} of DiTConfig"):
        DiTConfig(**values)
