"""Every reader of what comes from outside, with files that were bent at random: each is read, or refused in one line.

The mutations have a fixed seed, so a run that passes here passes again. `HOSTILE` in the environment sets how many
times the whole list is gone through in the slow test.
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
import shutil
import signal
import socket
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_bundle
import tiny_models
import tiny_networks
import torch
from PIL import Image, PngImagePlugin
from safetensors.torch import save_file

from pellucid import PellucidError, Scheduler, compile_plan
from pellucid.cli import sample
from pellucid.core.grid import Grid
from pellucid.core.loop import run
from pellucid.evidence import trace
from pellucid.evidence.metrics.image_text import pixels_of
from pellucid.evidence.study import samplers
from pellucid.evidence.study.kernel import Records, is_mine
from pellucid.evidence.study.schedules import ScheduleResults, ScheduleStudyConfig
from pellucid.evidence.study.subject import read_lines_of
from pellucid.evidence.trace import layout
from pellucid.interop import components, diffusers_config, folder, local_models, lora_file, source, weights
from pellucid.interop.diffusers_plan import compile_reading
from pellucid.interop.lora_parts import Strength
from pellucid.interop.tokenizer import Tokenizer
from pellucid.pipeline import images, parameters
from pellucid.pipeline.prepare import read_plan
from pellucid.pipeline.recipe import Recipe, read_png, read_sheet
from pellucid.train import image_folder
from pellucid.train.checkpoint import Chunk, Damage, FileSeal, Manifest, TensorEntry
from pellucid.train.config import TrainConfig, chosen
from pellucid.train.initial import fresh
from pellucid.train.kinds import DATA, TASKS
from pellucid.train.latent_cache import Cache, Scaling
from pellucid.train.ranks import Ranks

SECONDS = 5.0  # for one file
MOST_WORDS = 1100  # characters of a refusal
DIGITS, DEEP = "@digits@", "@deep@"  # what JSON's writer would not write: put into its text
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**9, -(10**9), 10**30, 0.5, -0.0, 1e308, -1e308, 1e-320, float("nan"),
    float("inf"), float("-inf"), "", "A" * 5000, "false", "1", "\0", "../../etc/passwd", "\ud800", "²", [], {}, [[]],
    [[[]]], [None], ["x"] * 3, {"": None}, {"a": {"b": []}}, [0] * 2000, DIGITS, DEEP,
]  # fmt: skip


class TooSlow(BaseException):
    """Past every `except Exception`."""


@contextmanager
def limited(seconds: float = SECONDS) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- mutations -------------------------------------------------------------------------------------------------


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to every value of a document, but the top."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:12]) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*above, key)
        yield from places(one, (*above, key))


def bent(document: Any, draw: random.Random) -> Any:
    """A document with one value replaced, taken away, wrapped, moved or added."""
    made = copy.deepcopy(document)
    ways = list(places(made))
    *above, last = draw.choice(ways)
    inner = made
    for step in above:
        inner = inner[step]
    match draw.choice(("value", "value", "value", "gone", "wrapped", "scaled", "renamed", "added")):
        case "value":
            inner[last] = copy.deepcopy(draw.choice(HOSTILE))
        case "gone":
            del inner[last]
        case "wrapped":
            inner[last] = draw.choice(([inner[last]], {"x": inner[last]}, [inner[last]] * 3))
        case "scaled" if isinstance(inner[last], int | float) and not isinstance(inner[last], bool):
            inner[last] = inner[last] * draw.choice((-1, 1000, 1e9, 0))
        case "renamed" if isinstance(inner, dict):
            inner[draw.choice(("", "x" * 3000, "kind", f"{last}s"))] = inner.pop(last)
        case _ if isinstance(inner, dict):
            inner[draw.choice(("", "zz", "_x", "type"))] = copy.deepcopy(draw.choice(HOSTILE))
        case _:
            inner[last] = copy.deepcopy(draw.choice(HOSTILE))
    return made


def written(document: Any) -> bytes:
    text = json.dumps(document, ensure_ascii=True)
    text = text.replace(f'"{DIGITS}"', "9" * 6000).replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000)
    return text.encode()


def spoilt(data: bytes, draw: random.Random) -> bytes:
    """Bytes that were cut, flipped, put in, taken out or doubled."""
    at = draw.randrange(max(len(data), 1))
    match draw.choice(("cut", "flip", "flip", "put", "out", "empty", "double")):
        case "cut":
            return data[:at]
        case "flip":
            held = bytearray(data or b"x")
            for _ in range(draw.choice((1, 8, 64))):
                held[draw.randrange(len(held))] ^= 1 << draw.randrange(8)
            return bytes(held)
        case "put":
            return data[:at] + draw.choice((b"\0", b"\xff\xfe", b"[" * 50_000, b"9" * 6000, b'"', b"\n")) + data[at:]
        case "out":
            return data[:at] + data[at + draw.randrange(1, 40) :]
        case "empty":
            return b""
    return data + data


def of_json(document: Any, draw: random.Random) -> bytes:
    """One in six is spoilt as bytes; the others stay JSON of another shape."""
    if draw.random() < 1 / 6:
        return spoilt(written(document), draw)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        document = bent(document, draw)
    return written(document)


# --- readers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """How a kind of file is made, bent and read. `whole` must be read without a word."""

    name: str
    whole: Callable[[], Any]  # a JSON document, or bytes
    read: Callable[[Path, bytes], object]
    file: str = "held.json"
    weight: int = 1


def network_of(kind: str) -> Callable[[Path, bytes], object]:
    def read(path: Path, data: bytes) -> object:
        path.write_bytes(data)
        settings = components.read_config(kind, weights.read_json(path), path.name)
        return weights.sketch(lambda: components.KINDS[kind].build(settings), path.name)

    return read


def read_scheduler(path: Path, data: bytes) -> object:
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        reading = diffusers_config.read(path, strict=False)
        return compile_reading(reading, 4, **({"mu": 1.0} if reading.values.get("use_dynamic_shifting") else {}))


def open_scheduler(path: Path, data: bytes) -> object:
    """As a user opens one, in a folder."""
    (path.parent / "scheduler").mkdir(exist_ok=True)
    (path.parent / "scheduler" / "scheduler_config.json").write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return Scheduler.from_pretrained(path.parent, subfolder="scheduler", strict=False).config


def in_folder(name: str, read: Callable[[Path], object]) -> Callable[[Path, bytes], object]:
    """A reader of a folder in which one file was bent; the file is put back."""

    def inner(path: Path, data: bytes) -> object:
        place = model_folder() / name
        before = place.read_bytes()
        place.write_bytes(data)
        try:
            return read(model_folder())
        finally:
            place.write_bytes(before)

    return inner


@cache
def model_folder() -> Path:
    """A tiny bundle of its own, to be bent."""
    goal = tiny_models.root() / "hostile"
    shutil.copytree(tiny_bundle.bundles() / tiny_bundle.NAME, goal)
    return goal


def held(name: str) -> Callable[[], Any]:
    def read() -> Any:
        data = (model_folder() / name).read_bytes()
        return json.loads(data) if name.endswith(".json") else data

    return read


def listed_parts(place: Path) -> object:
    index = folder.index_of(place)
    listed = components.named_classes(index)
    folder.check_pipeline(str(index.get("_class_name")))
    folder.check_parts(place, listed)
    return local_models.in_folder(place, "x", "folder"), folder.labels_of(index)


def read_tokenizer(place: Path) -> object:
    return Tokenizer.load(place / "tokenizer")


def saved_plan() -> Any:
    return json.loads(compile_plan("dpmpp_2m_sde", steps=5, grid="karras").to_json())


def read_plan_file(path: Path, data: bytes) -> object:
    path.write_bytes(data)
    return read_plan(path)


def recipe() -> Any:
    plan = compile_plan("euler", steps=2).to_dict()
    adapters = ({"name": "a", "kind": "lora", "hash": None, "scale": 0.5},)
    made = Recipe(
        model="m", prompt="a cat", sampler="euler", steps=4, seed=7, size=(16, 16), grid=Grid("karras").to_dict(),
        guidance={"scale": 4.0}, options={"eta": 0.5}, plan=plan, adapters=adapters, inputs={"image": "sha256:0"},
    )  # fmt: skip
    return json.loads(made.to_json())


def read_recipe(path: Path, data: bytes) -> object:
    """As the text of a PNG, alone and in a sheet."""
    text = data.decode("utf-8", errors="replace").replace("\0", "\ufffd")
    for key, words in (("pellucid", text), ("pellucid-sheet", f'{{"axes": "seed=1,2", "recipe": {text}}}')):
        info, buffer = PngImagePlugin.PngInfo(), io.BytesIO()
        info.add_itxt(key, words)
        Image.new("RGB", (2, 2)).save(buffer, format="PNG", pnginfo=info)
        buffer.seek(0)
        found = read_png(buffer) if key == "pellucid" else read_sheet(buffer)
    return found


PARAMETERS = (
    b"a cat <lora:x:0.5>\nNegative prompt: dog\nSteps: 20, Sampler: DPM++ 2M Karras, CFG scale: 7, Seed: 1, "
    b'Size: 512x768, Model hash: abc, Model: m, Lora hashes: "x: 1", Denoising strength: 0.5, Schedule rho: 7, Eta: 0.1'
)


def read_parameters(path: Path, data: bytes) -> object:
    return parameters.understand(data.decode("utf-8", errors="replace"))


@cache
def trace_bytes() -> bytes:
    path = model_folder().parent / "hostile.trace"
    plan = compile_plan("euler_a", steps=3)
    recorder = trace.Recorder(path, tensors=True, overwrite=True)
    run(plan, lambda x, level, time: x * 0.5, shape=(1, 2, 2), seeds=[1, 2], observers=[recorder])
    recorder.close()
    return path.read_bytes()


def trace_front() -> Any:
    data = trace_bytes()
    front = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    front["__metadata__"]["trace"] = json.loads(front["__metadata__"]["trace"])
    return front


def read_trace(path: Path, data: bytes) -> object:
    """The bent front before the old data; offsets count from the front's end."""
    old = trace_bytes()
    rest = old[8 + int.from_bytes(old[:8], "little") :]
    try:
        front = json.loads(data)
        front["__metadata__"]["trace"] = json.dumps(front["__metadata__"]["trace"])
        front["__metadata__"] = {**front["__metadata__"], layout.DIGEST: layout.NO_DIGEST}
        data = json.dumps(front).encode()  # signed again: a wrong digest is refused before anything else is looked at
        data = data.replace(layout.NO_DIGEST.encode(), layout.header_digest(data), 1)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass  # bent so that it is no front: read as it is
    path.write_bytes(len(data).to_bytes(8, "little") + data + rest)
    found = trace.read(path, partial=True)
    return found.header.plans, found.header.recipe, trace.read(path)


CONFIGS = Path(__file__).parents[1] / "configs"
STUDY = CONFIGS / "cifar10_schedules_smoke.toml"


def toml_of(value: Any) -> str:
    """What JSON says, as TOML says it on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml_of(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    special = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf", "null": '"null"'}
    text = json.dumps(value)
    return special.get(text, text)


def as_toml(data: bytes) -> bytes:
    """A bent JSON document as TOML; what is no JSON stays as it is."""
    try:
        found = json.loads(data)
        return "\n".join(f"{json.dumps(key)} = {toml_of(value)}" for key, value in found.items()).encode()
    except (ValueError, AttributeError, RecursionError):
        return data


def table_of(path: Path) -> Callable[[], Any]:
    def read() -> Any:
        return tomllib.loads(path.read_text("utf-8"))

    return read


def read_train(path: Path, data: bytes) -> object:
    path.write_bytes(as_toml(data))
    config = TrainConfig.load(path)
    config.fingerprint()
    return chosen(config.task, TASKS, "task"), chosen(config.data, DATA, "data")


def read_study(path: Path, data: bytes) -> object:
    path.write_bytes(as_toml(data))
    return ScheduleStudyConfig.load(path)


def study_config() -> Any:
    return {"study": "samplers", "version": 1, "mark": "m", "model": "m", "samplers": ["ddim"], "steps": [4]}


def read_study_folder(path: Path, data: bytes) -> object:
    (path.parent / "config.json").write_bytes(data)
    (path.parent / "records.jsonl").write_bytes(data + b"\n" + data[:-3])
    try:
        rows = Records.shared(path.parent, samplers.SamplerBatch._fields)
        samplers.SamplerFiles(path.parent, rows)
        return rows if b'"cell"' in data else is_mine(path.parent, json.dumps(study_config()))
    finally:
        (path.parent / "config.json").unlink()
        (path.parent / "records.jsonl").unlink()


def study_folder() -> Any:
    """A schedule study's config, one record and one window of a log, as one document."""
    config = {"study": "schedules", "version": 1, **table_of(STUDY)()}
    cell = {"schedule": "linear", "seed": 0, "step": 8, "ema": 64.0, "grid": "leading", "images": 128, "samples": 6}
    scores = {"fid": 1.0, "fid_low": 0.5, "fid_high": 2.0, "kid": 0.1, "precision": 0.5, "recall": 0.5}
    window = {
        "step": 4,
        "images": 64,
        "loss": 0.5,
        "images_per_s": 10.0,
        "levels": [{"lam": 0.0, "count": 3, "mean": 1.0}],
    }
    return {"config": config, "record": {**cell, **scores}, "window": window}


def read_schedule_results(path: Path, data: bytes) -> object:
    try:
        parts = {key: json.dumps(value).encode() for key, value in json.loads(data).items()}
    except (ValueError, AttributeError, RecursionError):
        parts = {"config": data, "record": data, "window": data}
    run_of = path.parent / "runs" / "linear-0"
    run_of.mkdir(parents=True, exist_ok=True)
    (path.parent / "config.json").write_bytes(parts.get("config", b"{}"))
    (path.parent / "records.jsonl").write_bytes(parts.get("record", b""))
    (run_of / "log.jsonl").write_bytes(parts.get("window", b""))
    found = ScheduleResults.read(path.parent)
    name = found.study.schedules[0]
    tables = [found.curve(name, "fid"), found.final(name), found.variants(name), found.seconds(name)]
    return tables, found.series(name, "images_per_s"), found.levels(name), found.done, found.last(name)


def record() -> Any:
    return {"cell": "ddim × 4", "first": 0, "what": "pictures", "numbers": 2, "distance": [0.5, 0.25]}


@cache
def tensors_bytes() -> bytes:
    path = model_folder().parent / "hostile.safetensors"
    save_file({"a": torch.ones(2, 3), "b.1": torch.zeros(4)}, path, {"format": "pt", "latents": "{}"})
    return path.read_bytes()


def tensors_front() -> Any:
    data = tensors_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def read_tensors(path: Path, data: bytes) -> object:
    old = tensors_bytes()
    path.write_bytes(len(data).to_bytes(8, "little") + data + old[8 + int.from_bytes(old[:8], "little") :])
    return weights.metadata_of(path), weights.read(path), weights.shapes_of(path), local_models.kind_of(path)


def read_whole_tensors(path: Path, data: bytes) -> object:
    path.write_bytes(data)
    return weights.read(path), weights.metadata_of(path)


def read_index(path: Path, data: bytes) -> object:
    (path.parent / "one.safetensors").write_bytes(tensors_bytes())
    path.write_bytes(data)
    return weights.read_shards(path)


def cache_manifest() -> Any:
    made = Cache("a", "b", 4, 2, Scaling(0.5, None, (0.0, 1.0), (1.0, 1.0)), complete=True, sizes=(10, 10))
    return json.loads(json.dumps({"format": 1, **asdict(made)}))


def read_cache(path: Path, data: bytes) -> object:
    (path.parent / "latents.json").write_bytes(data)
    return Cache.read(path.parent)


def checkpoint_manifest() -> Any:
    saved = TensorEntry(torch.float32, (2,), (Chunk("a.safetensors", "x", (0,), (2,)),))
    made = Manifest(3, {"seed": 1}, {"a.safetensors": FileSeal(10, "00")}, {"x": saved})
    return json.loads(made.to_json())


def read_checkpoint(path: Path, data: bytes) -> object:
    try:
        return Manifest.from_json(data.decode("utf-8", errors="replace"))
    except Damage:
        return None  # the newest undamaged one is looked for


ADAPTER = {"r": 4, "lora_alpha": 8, "alpha_pattern": {"to_q": 2}, "rank_pattern": {}, "use_rslora": False}


def read_adapter(path: Path, data: bytes) -> object:
    (path.parent / "adapter_config.json").write_bytes(data)
    (path.parent / "adapter_model.safetensors").write_bytes(tensors_bytes())
    found = lora_file.open_folder(path.parent, None)
    return Strength(None, lora_file.config_of(found, "unet"), ("down.to_q",)).factor(4)


PIXELS = {
    "resample": 3,
    "size": {"shortest_edge": 32},
    "crop_size": 32,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def read_pixels(path: Path, data: bytes) -> object:
    (path.parent / "preprocessor_config.json").write_bytes(data)
    network: Any = SimpleNamespace(config=SimpleNamespace(vision=SimpleNamespace(image_size=32)))
    return pixels_of(path.parent, network)


def read_rows(path: Path, data: bytes) -> object:
    path.write_bytes(data.replace(b"\n", b" ") + b"\n")
    return list(image_folder.read_rows(path, "", ("edges",)))


NETWORKS: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": {**tiny_networks.UNET, "transformer_layers_per_block": [1, 2], "norm_eps": 1e-5},
    "UNet2DModel": {
        "sample_size": 8, "block_out_channels": [8, 8], "layers_per_block": 1, "norm_num_groups": None,
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
        "attention_head_dim": 8, "freq_shift": 0, "flip_sin_to_cos": True,
    },
    "ControlNetModel": {
        **{k: v for k, v in tiny_networks.UNET.items() if k != "up_block_types"},
        "conditioning_embedding_out_channels": [4, 8],
    },
    "AutoencoderKL": {**tiny_networks.VAE, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4, "scaling_factor": 0.2},
    "AutoencoderTiny": {
        "encoder_block_out_channels": [4, 4], "decoder_block_out_channels": [4, 4], "num_encoder_blocks": [1, 1],
        "num_decoder_blocks": [1, 1], "act_fn": "relu", "latent_channels": 4,
    },
    "CLIPTextModel": {**tiny_networks.ENCODER, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 2},
    "CLIPVisionModelWithProjection": {**tiny_networks.ENCODER, "image_size": 16, "patch_size": 8},
    "CLIPModel": {
        "text_config": {**tiny_networks.ENCODER, "vocab_size": 64}, "projection_dim": 16,
        "vision_config": {**tiny_networks.ENCODER, "image_size": 16, "patch_size": 8}, "text_config_dict": None,
    },
    "DiTTransformer2DModel": {
        "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "sample_size": 4, "patch_size": 2,
    },
    "PixArtTransformer2DModel": tiny_networks.PIXART,
}  # fmt: skip
BETAS = {"num_train_timesteps": 1000, "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "DDIMScheduler": {**BETAS, "timestep_spacing": "leading", "set_alpha_to_one": False, "steps_offset": 1},
    "PNDMScheduler": {**BETAS, "skip_prk_steps": True, "prediction_type": "epsilon"},
    "EulerDiscreteScheduler": {**BETAS, "use_karras_sigmas": True, "sigma_min": None, "trained_betas": None},
    "DPMSolverMultistepScheduler": {**BETAS, "solver_order": 2, "algorithm_type": "dpmsolver++", "thresholding": True},
    "UniPCMultistepScheduler": {**BETAS, "solver_order": 2, "disable_corrector": [0], "use_flow_sigmas": False},
    "LCMScheduler": {**BETAS, "original_inference_steps": 50, "timestep_scaling": 10.0},
    "FlowMatchEulerDiscreteScheduler": {"num_train_timesteps": 1000, "shift": 3.0, "use_dynamic_shifting": True},
    "EDMEulerScheduler": {"sigma_min": 0.002, "sigma_max": 80.0, "sigma_data": 0.5, "rho": 7.0},
}


def saved_scheduler(kind: str, raw: dict[str, Any]) -> dict[str, Any]:
    return {"_class_name": kind, "_diffusers_version": "0.30.0", "_use_default_values": ["prediction_type"], **raw}


READERS = [
    *(Reader(kind, lambda raw=raw: copy.deepcopy(raw), network_of(kind), weight=2) for kind, raw in NETWORKS.items()),
    *(
        Reader(kind, lambda raw=raw, kind=kind: {"_class_name": kind, **raw}, read_scheduler)
        for kind, raw in SCHEDULERS.items()
    ),
    *(
        Reader(f"saved {kind}", lambda raw=raw, kind=kind: saved_scheduler(kind, raw), open_scheduler)
        for kind, raw in SCHEDULERS.items()
    ),
    Reader("model_index.json", held("model_index.json"), in_folder("model_index.json", listed_parts)),
    *(
        Reader(f"model {name}", held(name), in_folder(name, source.read_components))
        for name in ("model_index.json", "unet/config.json", "scheduler/scheduler_config.json")
    ),
    *(
        Reader(name, held(f"tokenizer/{name}"), in_folder(f"tokenizer/{name}", read_tokenizer))
        for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json")
    ),
    Reader("plan", saved_plan, read_plan_file, weight=3),
    Reader("recipe", recipe, read_recipe, weight=3),
    Reader("parameters", lambda: PARAMETERS, read_parameters, weight=2),
    Reader("trace", trace_front, read_trace, weight=4),
    *(Reader(name, table_of(CONFIGS / name), read_train, "held.toml") for name in ("cifar10.toml", "scenes_lora.toml")),
    Reader("schedule study", table_of(STUDY), read_study, "held.toml", weight=2),
    Reader("sampler study", study_config, read_study_folder),
    Reader("study records", record, read_study_folder),
    Reader("schedule results", study_folder, read_schedule_results, weight=2),
    Reader("safetensors header", tensors_front, read_tensors, "held.safetensors", weight=2),
    Reader("safetensors", tensors_bytes, read_whole_tensors, "held.safetensors"),
    Reader(
        "index", lambda: {"metadata": {"total_size": 40}, "weight_map": {"a": "one.safetensors"}}, read_index,
        "model.safetensors.index.json",
    ),
    Reader("latent cache", cache_manifest, read_cache),
    Reader("checkpoint", checkpoint_manifest, read_checkpoint),
    Reader("adapter", lambda: dict(ADAPTER), read_adapter),
    Reader("preprocessor", lambda: copy.deepcopy(PIXELS), read_pixels),
    Reader("metadata.jsonl", lambda: {"file_name": "a.png", "text": "a", "label": 3, "edges": "b.png"}, read_rows,
           "metadata.jsonl"),
]  # fmt: skip
BY_NAME = {reader.name: reader for reader in READERS}


def outcome(reader: Reader, path: Path, data: bytes) -> str | None:
    """How a file failed; nothing where it was read, or refused as it should be."""
    began = time.monotonic()
    try:
        with limited():
            reader.read(path, data)
    except PellucidError as error:
        text = str(error)
        if "\n" in text or len(text) > MOST_WORDS:
            return f"{len(text)} characters, {text.count(chr(10))} line ends: {text[:200]!r}"
    except TooSlow:
        return f"took longer than {time.monotonic() - began:.1f} s"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def went_wrong(reader: Reader, folder: Path, seeds: range) -> list[str]:
    found = []
    for seed in seeds:
        draw = random.Random(f"{reader.name} {seed}")
        whole = reader.whole()
        data = spoilt(whole, draw) if isinstance(whole, bytes) else of_json(whole, draw)
        if (why := outcome(reader, folder / reader.file, data)) is not None:
            found.append(f"{reader.name} {seed}: {why} | {data[:300]!r}")
    return found


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_bent_is_read_or_refused_in_a_line(name: str, tmp_path: Path) -> None:
    reader = BY_NAME[name]
    whole = reader.whole()
    reader.read(tmp_path / reader.file, whole if isinstance(whole, bytes) else written(whole))
    assert not went_wrong(reader, tmp_path, range(6 * reader.weight))


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_thousands_that_are_bent_are_read_or_refused_in_a_line(name: str, tmp_path: Path) -> None:
    times = int(os.environ.get("HOSTILE", "60"))
    assert not went_wrong(BY_NAME[name], tmp_path, range(1000, 1000 + times * BY_NAME[name].weight))


def test_enough_is_bent() -> None:
    assert sum(6 * reader.weight for reader in READERS) >= 300


# --- inputs by name --------------------------------------------------------------------------------------------


def refused(work: Callable[[], object], code: str, *words: str) -> str:
    with limited(), pytest.raises(PellucidError) as error:
        work()
    text = str(error.value)
    assert error.value.code == code, text
    for word in words:
        assert word in text
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("kind", "key", "value", "code"),
    [
        ("UNet2DConditionModel", "up_block_types", 1e308, "config-type"),
        ("UNet2DConditionModel", "sample_size", "AAAA", "config-type"),
        ("UNet2DConditionModel", "norm_num_groups", None, "config-type"),
        ("UNet2DConditionModel", "layers_per_block", 10**9, "config-value"),
        ("UNet2DConditionModel", "layers_per_block", -1, "config-value"),
        ("UNet2DConditionModel", "layers_per_block", [100, 100], None),
        ("UNet2DConditionModel", "transformer_layers_per_block", 10**9, "config-value"),
        ("UNet2DConditionModel", "attention_head_dim", 10**4, "config-value"),
        ("UNet2DConditionModel", "use_linear_projection", "false", "config-type"),
        ("UNet2DModel", "block_out_channels", "x", "config-type"),
        ("AutoencoderKL", "latents_mean", float("nan"), "config-type"),
        ("AutoencoderKL", "latents_mean", [float("nan")] * 4, "config-value"),
        ("AutoencoderKL", "scaling_factor", 0, "config-value"),
        ("CLIPTextModel", "num_hidden_layers", 10**9, "config-value"),
        ("CLIPTextModel", "vocab_size", 10**12, "config-value"),
        ("DiTTransformer2DModel", "num_layers", 10**9, "config-value"),
        ("PixArtTransformer2DModel", "sample_size", 10**9, "config-value"),
    ],
)
def test_a_network_with_a_wrong_config_is_refused_before_it_is_built(
    kind: str, key: str, value: Any, code: str | None, tmp_path: Path
) -> None:
    data = written({**NETWORKS[kind], key: value})
    if code is None:
        network_of(kind)(tmp_path / "config.json", data)
    else:
        refused(lambda: network_of(kind)(tmp_path / "config.json", data), code, kind[:4])


def test_a_network_of_more_blocks_than_any_is_refused(tmp_path: Path) -> None:
    """Each number is within its bounds, and their product is not."""
    raw = {**NETWORKS["UNet2DConditionModel"], "layers_per_block": 100, "transformer_layers_per_block": 100}
    read = network_of("UNet2DConditionModel")
    refused(lambda: read(tmp_path / "config.json", written(raw)), "config-value", "at most 1000 blocks")


def test_a_network_larger_than_the_memory_is_not_made() -> None:
    wide = {"num_attention_heads": 1000, "attention_head_dim": 1000, "num_layers": 1}
    raw = {**NETWORKS["DiTTransformer2DModel"], "_class_name": "DiTTransformer2DModel", **wide}
    refused(lambda: fresh(raw, 0), "network", "memory of this machine")


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("timestep_spacing", 0.5, "config-type"),
        ("_class_name", [[[]]], "config-class"),
        ("set_alpha_to_one", "false", "config-type"),
        ("num_train_timesteps", DIGITS, "config-file"),
        ("beta_start", DEEP, "config-file"),
        ("beta_start", float("nan"), "config-value"),
        ("num_train_timesteps", -1000, "config-value"),
        ("beta_end", -1.0, "betas"),
    ],
)
def test_a_scheduler_with_a_wrong_config_is_refused(key: str, value: Any, code: str, tmp_path: Path) -> None:
    raw = {"_class_name": "DDIMScheduler", **SCHEDULERS["DDIMScheduler"], key: value}
    refused(lambda: read_scheduler(tmp_path / "scheduler_config.json", written(raw)), code)
    refused(lambda: open_scheduler(tmp_path / "held", written(raw)), code)


@pytest.mark.parametrize("value", [5, True, "beta_end", [[1]], [5], {"beta_end": 1}], ids=str)
def test_the_defaults_that_a_scheduler_lists_are_names(value: Any, tmp_path: Path) -> None:
    raw = {"_class_name": "DDIMScheduler", "_use_default_values": value}
    refused(lambda: open_scheduler(tmp_path / "held", written(raw)), "config-type", "_use_default_values")


@pytest.mark.parametrize("key", [5, None, ("beta_end",)], ids=str)
def test_a_scheduler_config_has_texts_as_keys(key: Any) -> None:
    refused(lambda: Scheduler.from_config({"_class_name": "DDIMScheduler", key: 1}), "config-key")
    refused(lambda: diffusers_config.read({key: 1}), "config-key")


def test_a_text_is_no_boolean(tmp_path: Path) -> None:
    refused(
        lambda: read_adapter(tmp_path / "x", written({**ADAPTER, "use_rslora": "false"})), "lora-type", "use_rslora"
    )
    token = {"content": "<x>", "lstrip": "false"}
    (tmp_path / "vocab.json").write_text(json.dumps({"<|startoftext|>": 0, "<|endoftext|>": 1}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"2": token}}))
    refused(lambda: Tokenizer.load(tmp_path), "tokenizer-type", "lstrip")


def test_a_real_config_may_hold_an_infinity(tmp_path: Path) -> None:
    """diffusers writes lambda_min_clipped as -Infinity, which JSON has no word for."""
    raw = {"_class_name": "DPMSolverMultistepScheduler", **SCHEDULERS["DPMSolverMultistepScheduler"]}
    read_scheduler(tmp_path / "held.json", written({**raw, "lambda_min_clipped": float("-inf")}))


@pytest.mark.parametrize("place", [("grid", "steps"), ("schedule", "name"), ("rows", 0, "held"), ("options", "eta")])
def test_a_plan_with_a_wrong_type_is_refused(place: tuple[Any, ...], tmp_path: Path) -> None:
    data = saved_plan()
    inner = data
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = [] if place[-1] != "eta" else DEEP
    with pytest.raises(PellucidError, match="held") as error:
        read_plan_file(tmp_path / "held.json", written(data))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("versions", "x"), ("images", 2000), ("every", 0), ("plan_of", [5, 5]), ("recipes", [{}]), ("shape", None)],
)
def test_a_trace_with_a_wrong_header_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    front = trace_front()
    front["__metadata__"]["trace"][key] = value
    with limited(), pytest.raises(PellucidError):
        read_trace(tmp_path / "held.trace", written(front))


def test_more_images_than_there_are_are_refused(tmp_path: Path) -> None:
    for key in ("reference", "neighbours"):
        raw = {**table_of(STUDY)(), key: 50_000_000}
        refused(lambda raw=raw: read_study(tmp_path / "held.toml", written(raw)), "config-value", key, "at most 50000")
    raw = {**cache_manifest(), "count": 4000}
    refused(lambda: read_cache(tmp_path / "held.json", written(raw)), "latents-damaged", "4000")


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    long = written({"weight_map": {"a": "A" * 5000}})
    refused(lambda: read_index(tmp_path / "model.safetensors.index.json", long), "weights-index")
    row = written({"file_name": "A" * 5000, "edges": "b.png"})
    refused(lambda: read_rows(tmp_path / "metadata.jsonl", row), "data-metadata")
    refused(lambda: read_plan("A" * 5000), "plan-file")


def test_ids_beyond_a_vocabulary_are_refused_before_room_is_made(tmp_path: Path) -> None:
    for name, words in (("vocab.json", {"a": 0, "b": 4_000_000_000}), ("vocab.json", {"a": 0, "b": 2})):
        (tmp_path / name).write_text(json.dumps(words))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n")
        refused(lambda: Tokenizer.load(tmp_path), "tokenizer-files", "below 2, the size of the vocabulary")


@pytest.mark.parametrize(
    ("rank", "world"), [("3", "3"), ("5", "3"), ("0", "0"), ("1" * 5000, "2"), ("-1", "2"), ("²", "3")]
)
def test_a_rank_that_is_none_of_the_world_is_refused(rank: str, world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    refused(lambda: Ranks.join("ddp", "cpu"), "ranks-env")


# --- what is no plain file -------------------------------------------------------------------------------------

OPENERS: dict[str, Callable[[Path], object]] = {
    "image": images.read,
    "recipe": read_png,
    "plan": read_plan,
    "weights": weights.read,
    "safetensors": weights.read_safetensors,
    "model": source.read_components,
    "scheduler": diffusers_config.read,
    "adapter": lora_file.open_file,
    "training config": TrainConfig.load,
    "trace": trace.read,
    "prompts": lambda path: sample.prompts(f"@{path}"),
    "study prompts": lambda path: read_lines_of(path, "scenes:N"),
    "json": weights.read_json,
    "models": lambda path: local_models.kind_of(path) or refuse(path),
}


def refuse(path: Path) -> None:
    raise PellucidError(f"{path} is no model")


@pytest.fixture(params=["pipe", "socket", "device"])
def special(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that is none: opening the pipe, or reading the device to its end, would never come back."""
    path = tmp_path / "x.safetensors"
    with socket.socket(socket.AF_UNIX) as server:
        if request.param == "pipe":
            os.mkfifo(path)
        elif request.param == "device":
            path.symlink_to("/dev/zero")
        else:
            monkeypatch.chdir(tmp_path)  # a socket's path is short
            server.bind(path.name)
        yield path


@pytest.mark.parametrize("name", OPENERS)
def test_what_is_no_plain_file_is_not_opened(name: str, special: Path) -> None:
    with limited(2.0), pytest.raises(PellucidError) as error:
        OPENERS[name](special)
    assert special.name in str(error.value)
