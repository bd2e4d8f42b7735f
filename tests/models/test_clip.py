"""CLIP's networks equal transformers', under the names that checkpoints carry."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from pellucid.core.errors import PellucidError
from pellucid.models.clip import CLIP, CLIPTextEncoder, CLIPVisionEncoder, modern_names
from pellucid.models.clip_config import CLIPConfig, CLIPTextConfig, CLIPVisionConfig
from pellucid.models.config import read

TEXT: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "projection_dim": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 11,
    "bos_token_id": 58,
    "eos_token_id": 59,
    "pad_token_id": 1,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "projection_dim": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 12,
    "patch_size": 4,
}
CLOSE = 1e-5  # relative, float32: the contract's bound


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def spread(network: nn.Module) -> None:
    """Weights large enough that every part of the network shows in its output."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)


def peer(name: str, config: Any) -> Any:
    network = getattr(transformers, name)(config).eval()
    spread(network)
    return network


def ours(network: nn.Module, theirs: nn.Module) -> Any:
    network.load_state_dict(modern_names(theirs.state_dict()))
    return network.eval()


def prompts(eos: int = 59, length: int = 11) -> Tensor:
    """Three prompts of different lengths, padded with the end token; one is full of it."""
    tokens = torch.randint(3, 57, (3, length))
    tokens[:, 0] = 58
    tokens[0, 4:] = eos
    tokens[1, length - 1] = eos
    tokens[2, 1:] = eos
    return tokens


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("eos", [59, 2, 30])
def test_text_encoder_equals_transformers(activation: str, projected: bool, eos: int) -> None:
    name = "CLIPTextModelWithProjection" if projected else "CLIPTextModel"
    raw = {**TEXT, "hidden_act": activation, "eos_token_id": eos, "layer_norm_eps": 1e-3}
    theirs = peer(name, transformers.CLIPTextConfig(**raw))
    network = ours(CLIPTextEncoder(read(CLIPTextConfig, {**raw, "architectures": [name]})), theirs)
    tokens = prompts(59 if eos == 2 else eos)
    with torch.no_grad():
        want, got = theirs(tokens, output_hidden_states=True), network(tokens)
    assert len(got.hidden) == len(want.hidden_states) == 4
    for a, b in zip(got.hidden, want.hidden_states, strict=True):
        assert error(a, b) < CLOSE
    assert error(got.last, want.last_hidden_state) < CLOSE
    assert error(got.pooled, want.text_embeds if projected else want.pooler_output) < CLOSE


@pytest.mark.slow
def test_text_encoder_of_stable_diffusion_1_equals_transformers() -> None:
    """The full CLIP-L: 12 layers of width 768, 123 million weights, shared by the two networks."""
    raw = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "projection_dim": 768}
    theirs = transformers.CLIPTextModel(transformers.CLIPTextConfig(**raw)).eval()
    network = CLIPTextEncoder(read(CLIPTextConfig, raw)).eval()
    network.load_state_dict(modern_names(theirs.state_dict()), assign=True)
    tokens = torch.randint(0, 49405, (2, 77))
    tokens[:, -5:] = 49407
    with torch.no_grad():
        want, got = theirs(tokens, output_hidden_states=True), network(tokens)
    for a, b in zip(got.hidden, want.hidden_states, strict=True):
        assert error(a, b) < CLOSE
    assert error(got.last, want.last_hidden_state) < CLOSE
    assert error(got.pooled, want.pooler_output) < CLOSE


def test_the_two_rules_for_the_end_of_the_text_differ() -> None:
    """The test above would pass for the wrong reason if argmax and the first end token were always one place."""
    tokens = torch.tensor([[58, 5, 30, 40, 30, 30]])
    network = CLIPTextEncoder(read(CLIPTextConfig, {**TEXT, "eos_token_id": 30})).eval()
    legacy = CLIPTextEncoder(read(CLIPTextConfig, {**TEXT, "eos_token_id": 2})).eval()
    legacy.load_state_dict(network.state_dict())
    with torch.no_grad():
        assert torch.equal(network(tokens).pooled, network(tokens).last[:, 2])
        assert torch.equal(legacy(tokens).pooled, network(tokens).last[:, 0])  # 58 is the highest id


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
@pytest.mark.parametrize("projected", [False, True])
def test_vision_encoder_equals_transformers(activation: str, projected: bool) -> None:
    name = "CLIPVisionModelWithProjection" if projected else "CLIPVisionModel"
    raw = {**VISION, "hidden_act": activation}
    theirs = peer(name, transformers.CLIPVisionConfig(**raw))
    network = ours(CLIPVisionEncoder(read(CLIPVisionConfig, {**raw, "architectures": [name]})), theirs)
    pixels = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        want, got = theirs(pixels, output_hidden_states=True), network(pixels)
    for a, b in zip(got.hidden, want.hidden_states, strict=True):
        assert error(a, b) < CLOSE
    assert error(got.last, want.last_hidden_state) < CLOSE
    assert error(got.pooled, want.image_embeds if projected else want.pooler_output) < CLOSE


def pair() -> tuple[CLIP, Any]:
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=10)
    theirs = peer("CLIPModel", config)
    return ours(CLIP(read(CLIPConfig, config.to_dict())), theirs), theirs


def test_clip_scores_equal_transformers() -> None:
    network, theirs = pair()
    tokens, pixels = prompts(), torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        want, got = theirs(input_ids=tokens, pixel_values=pixels), network(tokens, pixels)
        assert error(network.embed_text(tokens), want.text_embeds) < CLOSE
        assert error(network.embed_image(pixels), want.image_embeds) < CLOSE
    assert error(got, want.logits_per_image) < CLOSE


@pytest.mark.parametrize("name", ["CLIPTextModel", "CLIPTextModelWithProjection"])
def test_text_weights_have_the_names_of_checkpoints(name: str) -> None:
    theirs = peer(name, transformers.CLIPTextConfig(**TEXT)).state_dict()
    network = CLIPTextEncoder(CLIPTextConfig(**TEXT, architectures=(name,)))
    assert set(network.state_dict()) == set(modern_names(theirs))
    assert "text_model.embeddings.token_embedding.weight" in network.state_dict()
    assert ("text_projection.weight" in network.state_dict()) == name.endswith("WithProjection")


@pytest.mark.parametrize("name", ["CLIPVisionModel", "CLIPVisionModelWithProjection"])
def test_vision_weights_have_the_names_of_checkpoints(name: str) -> None:
    theirs = peer(name, transformers.CLIPVisionConfig(**VISION)).state_dict()
    network = CLIPVisionEncoder(CLIPVisionConfig(**VISION, architectures=(name,)))
    assert set(network.state_dict()) == set(modern_names(theirs))
    assert "vision_model.pre_layrnorm.weight" in network.state_dict()


def test_pair_has_the_names_of_checkpoints() -> None:
    network, theirs = pair()
    assert set(network.state_dict()) == set(theirs.state_dict())


@pytest.mark.parametrize("name", ["CLIPTextModel", "CLIPTextModelWithProjection"])
def test_a_folder_of_transformers_loads_and_back(name: str, tmp_path: Path) -> None:
    """Whichever names transformers writes, we read; and it reads ours, which are those of the hub."""
    theirs = peer(name, transformers.CLIPTextConfig(**TEXT))
    theirs.save_pretrained(tmp_path)
    raw = transformers.CLIPTextConfig.from_pretrained(tmp_path).to_dict()
    network = CLIPTextEncoder(read(CLIPTextConfig, raw)).eval()
    network.load_state_dict(modern_names(load_file(tmp_path / "model.safetensors")))
    save_file(network.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    again, report = getattr(transformers, name).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        tokens = prompts()
        assert error(network(tokens).last, again.eval()(tokens).last_hidden_state) < CLOSE


def test_old_files_carry_a_buffer_that_is_dropped() -> None:
    network = CLIPTextEncoder(CLIPTextConfig(**TEXT))
    old = {**network.state_dict(), "text_model.embeddings.position_ids": torch.arange(11)[None]}
    assert set(modern_names(old)) == set(network.state_dict())


def test_generic_keys_of_transformers_are_accepted() -> None:
    raw = transformers.CLIPTextConfig(**TEXT).to_dict()
    old = {"return_dict": True, "temperature": 1.0, "torch_dtype": "float16", "dropout": 0.0, "top_k": 50}
    assert read(CLIPTextConfig, {**raw, **old}) == CLIPTextConfig(**TEXT)
    assert read(CLIPVisionConfig, transformers.CLIPVisionConfig(**VISION).to_dict()) == CLIPVisionConfig(**VISION)


def test_a_network_names_its_class() -> None:
    plain = CLIPTextEncoder(CLIPTextConfig(**TEXT))
    assert plain.config.architectures == ("CLIPTextModel",)
    projected = CLIPVisionEncoder(CLIPVisionConfig(**VISION), projection=True)
    assert projected.config.architectures == ("CLIPVisionModelWithProjection",)
    assert read(CLIPVisionConfig, asdict(projected.config)) == projected.config


def test_defaults_are_those_of_transformers() -> None:
    for mine, theirs in (
        (CLIPTextConfig(), transformers.CLIPTextConfig()),
        (CLIPVisionConfig(), transformers.CLIPVisionConfig()),
    ):
        for key, value in asdict(mine).items():
            assert getattr(theirs, key) == value, key


@pytest.mark.parametrize(
    ("cls", "bad", "code", "words"),
    [
        (CLIPTextConfig, {"hidden_act": "relu"}, "config-unsupported", "hidden_act .* quick_gelu or gelu; got 'relu'"),
        (CLIPTextConfig, {"hidden_size": 18}, "config-unsupported", "multiple of num_attention_heads, 4; got 18"),
        (CLIPTextConfig, {"eos_token_id": None}, "config-type", "eos_token_id .* whole number; got nothing"),
        (CLIPTextConfig, {"use_attention_mask": True}, "config-unsupported", "use_attention_mask"),
        (CLIPTextConfig, {"model_type": "t5"}, "config-unsupported", "model_type .* got 't5'"),
        (CLIPTextConfig, {"rope_theta": 1e4}, "config-key", "rope_theta"),
        (CLIPTextConfig, {"quantization_config": {"bits": 4}}, "config-key", "quantization_config"),
        (CLIPVisionConfig, {"image_size": [12, 12]}, "config-type", "image_size .* a whole number"),
        (CLIPVisionConfig, {"num_hidden_layers": 0}, "config-value", "from 1 to 1000; got 0"),
    ],
)
def test_a_config_that_would_change_the_result_is_refused(cls: Any, bad: dict, code: str, words: str) -> None:
    good = TEXT if cls is CLIPTextConfig else VISION
    with pytest.raises(PellucidError, match=words) as caught:
        read(cls, {**good, **bad})
    assert caught.value.code == code


def test_wrong_inputs_are_refused_in_words() -> None:
    with pytest.raises(PellucidError, match="at most 11; got 12"):
        CLIPTextEncoder(CLIPTextConfig(**TEXT))(torch.zeros(1, 12, dtype=torch.int64))
    with pytest.raises(PellucidError, match="shape of an image for CLIP"):
        CLIPVisionEncoder(CLIPVisionConfig(**VISION))(torch.zeros(1, 3, 8, 12))


@pytest.mark.parametrize("eos", [59, 2])
def test_text_encoder_compiles_once_for_all_prompts(eos: int) -> None:
    config = CLIPTextConfig(**{**TEXT, "eos_token_id": eos}, architectures=("CLIPTextModelWithProjection",))
    network = CLIPTextEncoder(config).eval()
    counter = CompileCounter()
    compiled = torch.compile(network, backend=counter, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            tokens = prompts()
            assert torch.equal(compiled(tokens).pooled, network(tokens).pooled)
    assert counter.frame_count == 1


def test_vision_encoder_and_pair_compile_once() -> None:
    network, _ = pair()
    counter = CompileCounter()
    compiled = torch.compile(network, backend=counter, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            compiled(prompts(), torch.randn(2, 3, 12, 12))
    assert counter.frame_count == 1


def test_new_tokens_make_a_view_that_shares_all_else() -> None:
    network = CLIPTextEncoder(CLIPTextConfig(**TEXT)).eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    vectors = torch.randn(2, 16)
    view = network.with_tokens([60, 61], vectors, eos=59)
    table = "text_model.embeddings.token_embedding.weight"
    for name, value in view.state_dict().items():
        assert (value.data_ptr() == network.state_dict()[name].data_ptr()) == (name != table)
    assert torch.equal(view.state_dict()[table][60:], vectors)
    assert view.config.vocab_size == 62
    assert network.config.vocab_size == 60
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    with torch.no_grad():
        tokens = prompts()
        assert torch.equal(view(tokens).last, network(tokens).last)


def test_a_new_token_does_not_pass_for_the_end_of_the_text() -> None:
    """transformers' legacy rule takes the highest id, which a new token would have."""
    network = CLIPTextEncoder(CLIPTextConfig(**{**TEXT, "eos_token_id": 2})).eval()
    view = network.with_tokens([60], torch.randn(1, 16), eos=59)
    tokens = torch.tensor([[58, 60, 4, 59, 59]])
    with torch.no_grad():
        states = view(tokens)
        assert torch.equal(states.pooled, states.last[:, 3])
        plain = prompts()
        assert torch.equal(view(plain).pooled, network(plain).pooled)


def test_vectors_of_another_width_are_refused_with_both_widths() -> None:
    with pytest.raises(PellucidError, match="16, the encoder's; got 20"):
        CLIPTextEncoder(CLIPTextConfig(**TEXT)).with_tokens([60], torch.zeros(1, 20), eos=59)
