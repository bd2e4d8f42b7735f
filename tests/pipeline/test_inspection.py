"""The graph of a pipeline: its figures against the peers' own, its shapes against real runs, its files unread."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import save_file
from torch import nn

from pellucid.core import schedule as schedules
from pellucid.core.errors import PellucidError
from pellucid.interop import weights
from pellucid.interop.components import KINDS, Components
from pellucid.interop.tokenizer import Tokenizer
from pellucid.pipeline.inspection import Graph, GraphOptions, blocks_of
from pellucid.pipeline.inspection_graph import graph_of, inspect, sketch, with_times
from pellucid.pipeline.load import load
from pellucid.pipeline.pipeline import Pipeline

SMALL = (32, 32)
VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
}
SD15 = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
XL = {
    **tiny.XL_UNET,
    "block_out_channels": [320, 640, 1280],
    "transformer_layers_per_block": [1, 2, 10],
    "cross_attention_dim": 2048,
    "attention_head_dim": [5, 10, 20],
    "projection_class_embeddings_input_dim": 2816,
}
CLIP_L = {
    "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12,
    "vocab_size": 49408, "max_position_embeddings": 77,
}  # fmt: skip
CLIP_G = {
    **CLIP_L, "hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 20, "num_hidden_layers": 32,
    "projection_dim": 1280, "hidden_act": "gelu",
}  # fmt: skip
EULER = {"_class_name": "EulerDiscreteScheduler", **tiny.LATENT_BETAS}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def built(kind: str, raw: dict[str, Any]) -> Any:
    """A network on meta, from its config alone."""
    owner = {"architectures": [kind]} if kind.startswith("CLIP") else {"_class_name": kind}
    settings = KINDS[kind].read({**raw, **owner})
    return weights.sketch(lambda: KINDS[kind].build(settings), kind)


def full_size(unet: dict[str, Any], encoders: tuple[Any, ...], pipeline: str) -> Pipeline:
    """A published model without its weights."""
    parts = Components(
        name="full",
        pipeline_class=pipeline,
        network=built("UNet2DConditionModel", unet),
        vae=built("AutoencoderKL", VAE),
        text_encoders=encoders,
        tokenizers=tuple(Tokenizer.from_merges([]) for _ in encoders),
        image_encoder=None,
        controlnets=(),
        scheduler=EULER,
        schedule=schedules.scaled_linear(),
        target="eps",
    )
    return Pipeline(parts, device=torch.device("meta"))


def shapes(graph: Graph) -> dict[tuple[str, str, str], tuple[tuple[int, ...], ...]]:
    return {(flow.source, flow.goal, flow.what): flow.shapes for flow in graph.flows}


@cache
def small(name: str, **asked: Any) -> Graph:
    size = None if name in ("ddpm", "dit") else SMALL
    return inspect(tiny.saved(name)[1], GraphOptions(**{"size": size, "steps": 4, **asked}))


# --- published figures -------------------------------------------------------------------------------------------


def test_stable_diffusion_1_has_its_published_figures():
    pipe = full_size(SD15, (built("CLIPTextModel", CLIP_L),), "StableDiffusionPipeline")
    graph = graph_of(pipe, GraphOptions(batch=3, steps=20))
    counts = {node.name: node.parameters for node in graph.components()}
    assert counts == {"text_encoder": 123_060_480, "unet": 859_520_964, "vae": 83_653_863}
    assert graph.family == "Stable Diffusion 1"
    assert (graph.size, graph.steps, graph.calls) == ((512, 512), 20, 20)
    assert shapes(graph) == {
        ("prompt", "tokenizer", "text"): (),
        ("tokenizer", "text_encoder", "token ids"): ((3, 77),),
        ("text_encoder", "conditions", "states"): ((3, 77, 768),),
        ("conditions", "unet", "context"): ((6, 77, 768),),
        ("sampler", "unet", "x"): ((6, 4, 64, 64),),
        ("sampler", "unet", "time"): ((6,),),
        ("unet", "guidance", "eps"): ((6, 4, 64, 64),),
        ("guidance", "sampler", "x0"): ((3, 4, 64, 64),),
        ("noise", "sampler", "noise"): ((3, 4, 64, 64),),
        ("sampler", "vae", "latents"): ((3, 4, 64, 64),),
        ("vae", "images", "pixels"): ((3, 3, 512, 512),),
    }
    bottom = {block.name: block.shape for block in graph.node("unet").blocks}["mid_block"]
    assert bottom == (6, 1280, 8, 8)


@pytest.mark.slow
def test_sdxl_has_its_published_figures():
    encoders = (built("CLIPTextModel", CLIP_L), built("CLIPTextModelWithProjection", CLIP_G))
    graph = graph_of(full_size(XL, encoders, "StableDiffusionXLPipeline"), GraphOptions(size=(1152, 896)))
    counts = {node.name: node.parameters for node in graph.components()}
    assert counts["text_encoder_2"] == 694_659_840
    assert counts["unet"] == 2_567_463_684
    found = shapes(graph)
    assert found["text_encoder_2", "conditions", "states"] == ((1, 77, 1280),)
    assert found["text_encoder_2", "conditions", "pooled"] == ((1, 1280),)
    assert found["size ids", "conditions", "size ids"] == ((1, 6),)
    assert found["conditions", "unet", "context"] == ((2, 77, 2048),)
    assert found["conditions", "unet", "pooled"] == ((2, 1280),)
    assert found["conditions", "unet", "size ids"] == ((2, 6),)
    assert found["sampler", "vae", "latents"] == ((1, 4, 112, 144),)
    assert found["vae", "images", "pixels"] == ((1, 3, 896, 1152),)


# --- against the peers and against real runs ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd1", "xl", "refiner", "inpaint", "lcm", "ddpm", "dit"])
def test_parameters_bytes_and_classes_are_the_peers(name: str):
    peer, folder = tiny.saved(name)
    graph = small(name)
    networks = {part: value for part, value in peer.components.items() if isinstance(value, nn.Module)}
    assert {node.name for node in graph.components()} == set(networks)
    for node in graph.components():
        network = networks[node.name]
        held = sum(weight.nbytes for weight in network.state_dict().values())
        assert node.parameters == network.num_parameters()
        assert node.peer == type(network).__name__
        assert (node.stored.size, node.stored.dtypes, node.memory) == (held, ("float32",), held)
        assert all((folder / node.name / file).is_file() for file in node.stored.files)
    assert graph.parameters == sum(network.num_parameters() for network in networks.values())


@pytest.mark.parametrize(
    ("name", "words"), [("sd1", {"prompt": ["a", "b"]}), ("dit", {"label": [1, 2]}), ("ddpm", {"n": 2})]
)
def test_shapes_are_those_of_a_real_run(name: str, words: dict[str, Any]):
    graph = small(name, batch=2)
    pipe = load(tiny.saved(name)[1], device="cpu")
    called: list[tuple[int, ...]] = []
    hook = pipe.components.network.register_forward_hook(lambda _, args, out: called.append((args[0].shape, out.shape)))
    size = {} if name in ("ddpm", "dit") else {"width": 32, "height": 32}
    made = pipe(seed=0, steps=4, **words, **size)
    hook.remove()
    found = shapes(graph)
    main = graph.of("network")[0].name
    goal = "guidance" if graph.of("guidance") else "sampler"
    [out] = [shape for (source, end, _), shape in found.items() if (source, end) == (main, goal)]
    assert (found["sampler", main, "x"][0], out[0]) == tuple(tuple(shape) for shape in called[0])
    assert found["noise", "sampler", "noise"] == (tuple(made.latents.shape),)
    assert graph.calls == len(called) == graph.node(main).calls
    assert made.images[0].size == graph.size
    assert [shape for (_, end, _), shape in found.items() if end == "images"] == [((2, 3, *graph.size),)]


def test_guidance_off_is_not_doubled():
    graph = small("sd1", guidance="off")
    assert not graph.of("guidance")
    assert shapes(graph)["unet", "sampler", "eps"] == ((1, 4, 16, 16),)
    assert graph.node("conditions").facts["sides"] == "with the prompt"


def test_inpainting_shows_the_mask_and_the_masked_image():
    graph = small("inpaint")
    found = shapes(graph)
    assert found["mask", "unet", "mask"] == ((1, 1, 16, 16),)
    assert found["vae encoder", "unet", "masked latents"] == ((1, 4, 16, 16),)
    assert graph.node("unet").facts["sees"] == (2, 9, 16, 16)
    assert found["sampler", "unet", "x"] == ((2, 4, 16, 16),)
    assert graph.node("vae encoder").half_of == "vae"
    assert graph.parameters == sum(graph.node(name).parameters for name in ("text_encoder", "unet", "vae"))


def test_a_class_is_told_and_the_variance_is_seen():
    graph = small("dit")
    found = shapes(graph)
    assert found["class label", "conditions", "labels"] == ((1,),)
    assert found["conditions", "transformer", "labels"] == ((2,),)
    assert found["transformer", "guidance", "eps, variance"] == ((2, 8, 8, 8),)


def test_a_network_that_is_told_its_guidance():
    graph = small("lcm")
    assert shapes(graph)["conditions", "unet", "guidance"] == ((1, 16),)
    assert not graph.of("guidance")


@pytest.fixture(scope="module")
def extras(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A ControlNet, an image encoder and an IP-Adapter for the tiny model."""
    return tiny.extras(tmp_path_factory.mktemp("extras"))


def test_controlnets_and_image_prompts(extras: tuple[Path, Path, Path]):
    control, eyes, adapter = extras
    asked = GraphOptions(size=SMALL, steps=4, controlnets=(control, control), ip_adapters=(adapter,))
    graph = inspect(tiny.saved("sd1")[1], asked, image_encoder=eyes)
    found = shapes(graph)
    assert found["control image 2", "controlnet_1", "pixels"] == ((1, 3, 32, 32),)
    assert found["sampler", "controlnet", "x"] == ((2, 4, 16, 16),)
    residuals = found["controlnet", "unet", "residuals"]
    assert residuals[0] == (2, 32, 16, 16)
    assert residuals[-1] == (2, 64, 8, 8)
    assert len(residuals) == 1 + 2 + 1 + 2 + 1  # the first, two blocks, a halving, two blocks, the middle
    assert found["image prompt", "image_encoder", "pixels"] == ((1, 3, 32, 32),)
    assert found["image_encoder", "ip_adapter", "pooled"] == ((1, 20),)
    tokens = found["ip_adapter", "unet", "keys and values"]
    places = sketch(tiny.saved("sd1")[1]).components.network.cross_attentions()
    assert len(tokens) == 2 * len(places)
    assert tokens[0] == (2, places[0][0].attn2.heads, 4, 32 // places[0][0].attn2.heads)
    assert graph.node("ip_adapter").stored.size == adapter.stat().st_size - header_size(adapter)
    assert graph.node("ip_adapter").facts["tokens"] == 4


def test_an_image_encoder_alone_is_said_to_wait(extras: tuple[Path, Path, Path]):
    graph = inspect(tiny.saved("sd1")[1], GraphOptions(size=SMALL), image_encoder=extras[1])
    assert any("image_encoder is not used without an IP-Adapter" in note for note in graph.notes)
    assert not graph.out_of("image_encoder")


def test_an_adapter_without_its_encoder_is_refused(extras: tuple[Path, Path, Path]):
    with pytest.raises(PellucidError, match="image_encoder must be given"):
        small("sd1", ip_adapters=(extras[2],))


# --- files -------------------------------------------------------------------------------------------------------


def header_size(path: Path) -> int:
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]


def hole(path: Path, network: nn.Module) -> int:
    """A file with a true header and no data behind it: a hole of gigabytes takes no disk. Its bytes of tensors."""
    head, at = {}, 0
    for name, tensor in network.state_dict().items():
        head[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": [at, at + 2 * tensor.numel()]}
        at += 2 * tensor.numel()
    raw = json.dumps(head).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
    return at


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads Linux's account of memory")
def test_gigabytes_are_inspected_without_being_read(tmp_path: Path):
    raw = {
        "_class_name": "UNet2DModel", "sample_size": 32, "block_out_channels": [512, 2048], "layers_per_block": 2,
        "down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2, "norm_num_groups": 32,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "scheduler_config.json").write_text(json.dumps({"_class_name": "DDPMScheduler"}))
    size = hole(tmp_path / "diffusion_pytorch_model.safetensors", built("UNet2DModel", raw))
    assert size > 10**9
    small("ddpm")  # what torch and the files need once is not counted
    before = resident()
    graph = inspect(tmp_path)
    assert graph.node("unet").stored.size == graph.node("unet").memory == size
    assert resident() - before < 100 * 2**20


def test_a_single_file_has_the_figures_of_its_folder(tmp_path: Path):
    peer, folder = tiny.saved("sd1")
    path = tmp_path / "model.safetensors"
    more = {"model_ema.decay": torch.ones(1)}  # of training: no component holds it
    save_file({k: v.contiguous().clone() for k, v in {**tiny.checkpoint(peer), **more}.items()}, path)
    asked = GraphOptions(size=(128, 128), steps=4)
    one, other = inspect(path, asked, tokenizer=folder / "tokenizer"), inspect(folder, asked)
    for part in ("text_encoder", "unet", "vae"):
        mine, twin = one.node(part), other.node(part)
        assert (mine.parameters, mine.stored.size, mine.blocks) == (twin.parameters, twin.stored.size, twin.blocks)
        assert mine.stored.files == ("model.safetensors",)


def test_half_precision_on_disk_and_what_it_becomes(tmp_path: Path):
    folder = tiny.copied("sd1", tmp_path)
    for part in ("unet", "vae"):
        path = folder / part / "diffusion_pytorch_model.safetensors"
        save_file({name: tensor.half() for name, tensor in weights.read(path).items()}, path)
    graph = inspect(folder, GraphOptions(size=SMALL))
    unet, vae = graph.node("unet"), graph.node("vae")
    assert (unet.stored.dtypes, unet.dtype, unet.memory) == (("float16",), "float16", 2 * unet.parameters)
    assert (vae.stored.dtypes, vae.dtype, vae.memory) == (("float16",), "float32", 4 * vae.parameters)
    assert any("force_upcast" in note for note in graph.notes)
    as_asked = inspect(folder, GraphOptions(size=SMALL), dtype="bfloat16").node("unet")
    assert (as_asked.stored.dtypes, as_asked.dtype) == (("float16",), "bfloat16")


def test_what_the_files_contradict_is_told(tmp_path: Path):
    folder = tiny.copied("dit", tmp_path)
    path = folder / "scheduler" / "scheduler_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "prediction_type": "v_prediction"}))
    graph = inspect(folder)
    assert any("the target is v, but DiT predicts eps" in note for note in graph.notes)
    assert graph.node("sampler").facts["target"] == "v"


def test_a_scheduler_that_does_not_run_here_is_replaced_and_said(tmp_path: Path):
    folder = tiny.copied("ddpm", tmp_path)
    config = {"_class_name": "DDPMScheduler", "variance_type": "learned"}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    graph = inspect(folder)
    assert any("learned variance" in note for note in graph.notes)
    assert graph.node("sampler").peer == "DDPMScheduler"


# --- blocks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd1", "xl", "dit", "ddpm"])
def test_shares_add_up_at_every_level(name: str):
    for node in small(name, depth=3).components():
        assert sum(block.parameters for block in node.blocks) == node.parameters
        assert sum(block.share for block in node.blocks) == pytest.approx(1.0)
        for block in node.blocks:
            for inner in (block, *block.blocks):
                if inner.blocks:
                    assert sum(part.parameters for part in inner.blocks) == inner.parameters


def test_blocks_are_named_as_in_the_files():
    names = [block.name for block in small("sd1").node("unet").blocks]
    assert names == [
        "conv_in", "time_embedding", "down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.0", "up_blocks.1",
        "conv_norm_out", "conv_out",
    ]  # fmt: skip
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 0) == ()


def test_weights_that_are_shared_count_once():
    shared = nn.Linear(3, 3)
    network = nn.Module()
    network.first, network.second = nn.Sequential(shared, nn.Linear(3, 1)), nn.Sequential(shared, nn.Linear(3, 2))
    assert sum(block.parameters for block in blocks_of(network, 1)) == 12 + 4 + 8


# --- the graph as data -------------------------------------------------------------------------------------------


def test_a_loaded_pipeline_has_the_same_graph_and_keeps_its_weights():
    folder = tiny.saved("sd1")[1]
    asked = GraphOptions(size=SMALL, steps=4)
    pipe = load(folder, device="cpu")
    graph = graph_of(pipe, asked)
    plain = inspect(folder, asked)
    assert graph.flows == plain.flows
    assert graph.nodes == tuple(replace(node, stored=None) for node in plain.nodes)
    assert not any(weight.is_meta for weight in pipe.components.network.parameters())
    assert not pipe.components.network._forward_hooks


def test_the_graph_is_json():
    graph = small("xl")
    held = json.loads(json.dumps(graph.to_dict(), allow_nan=False))
    assert held["parameters"] == graph.parameters
    assert held["stored"] == graph.stored == graph.memory
    assert [node["name"] for node in held["nodes"]] == [node.name for node in graph.nodes]
    ends = {end for flow in held["flows"] for end in (flow["source"], flow["goal"])}
    assert ends == {node["name"] for node in held["nodes"]}


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"size": (33, 32)}, "size-multiple"),
        ({"batch": 0}, "request"),
        ({"batch": True}, "request"),
        ({"steps": 0}, "steps"),
        ({"guidance": float("nan")}, "guidance"),
    ],
)
def test_bad_questions_are_refused(asked: dict[str, Any], code: str):
    with pytest.raises(PellucidError) as error:
        small("sd1", **asked)
    assert error.value.code == code


def test_an_unknown_component_is_refused_with_the_nearest():
    with pytest.raises(PellucidError, match=r"one of text_encoder, unet, vae; got 'unit'. Nearest: unet"):
        small("sd1").node("unit")


# --- time --------------------------------------------------------------------------------------------------------


def test_times_are_measured_by_stage_and_by_network():
    folder = tiny.saved("sd1")[1]
    asked, rows = GraphOptions(size=SMALL, steps=3), []
    ticks: list[int] = []

    def watch(count: int) -> Any:
        rows.append(count)
        return lambda: ticks.append(1)

    graph = with_times(inspect(folder, asked), folder, asked, watch, device="cpu")
    times = graph.times
    assert rows == [len(ticks)]
    assert min(times.text, times.step, times.decode) > 0
    assert times.whole > times.text + times.decode
    assert times.whole > times.step
    assert graph.node("unet").milliseconds > 0
    assert graph.node("vae").milliseconds == times.decode
    assert graph.node("sampler").milliseconds is None
    assert (times.device, times.runs, times.peaks) == ("cpu", 3, {})
    json.dumps(graph.to_dict(), allow_nan=False)
