"""Training on a GPU: captured, compiled and fed from a side stream, it takes the steps that the plain loop takes.

pytest -m gpu tests/gpu/test_training.py
PYTHONPATH=src python3 tests/gpu/test_training.py [NAME …]      where there is no pytest
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pellucid import scenes as world
from pellucid.interop.save import save_component
from pellucid.scenes import renderer
from pellucid.train.autoencoder import Autoencoder
from pellucid.train.cifar10 import CIFAR10, CIFAR10Source
from pellucid.train.config import TrainConfig, read
from pellucid.train.initial import fresh
from pellucid.train.ranks import Ranks
from pellucid.train.scenes_source import scenes_tokenizer
from pellucid.train.source import Feed
from pellucid.train.trainer import Trainer

try:
    import pytest
except ModuleNotFoundError:  # a bare machine
    pytest = None  # type: ignore[assignment]
else:
    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        pytest.mark.filterwarnings("default"),  # compilers warn of themselves
    ]

SIDE, RATE = 8, 2e-3
NETWORK: dict[str, Any] = {
    "_class_name": "UNet2DModel",
    "sample_size": SIDE,
    "block_out_channels": [16, 16],
    "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "norm_num_groups": 4,
    "attention_head_dim": 8,
}
RUN: dict[str, Any] = {
    "task": {
        "kind": "denoiser",
        "network": NETWORK,
        "objective": {"schedule": {"name": "linear"}, "times": {"stratified": True}},
        "sampling": {"steps": 2},
    },
    "data": {"kind": "cifar10", "folder": "not read"},
    "steps": 8,
    "batch": 16,
    "ema": [64.0, 256.0],
    "optimizer": {"rate": RATE, "warmup": 3, "eps": 1e-5},
    "log": {"every": 2, "checkpoint_every": 4, "tensorboard": False},
}
CAPTURE = {"engine": {"capture": True}}
# Two runs may round gradients apart, and the rate is a float32 where it is captured. Adam would make steps of full
# length of gradients that are nothing but rounding (a bias of keys), were it not for the large eps. A wrong rate, batch
# or moment in a single step would show as some 1e-3.
NEAR = 2e-4


def merged(base: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(base)
    for change in changes:
        for key, value in change.items():
            made[key] = merged(made[key], value) if isinstance(value, dict) and key in made else copy.deepcopy(value)
    return made


def images(count: int = 64) -> CIFAR10:
    """A colour a class, with a little noise."""
    dice = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 4
    colours = torch.randint(30, 226, (4, 3, 1, 1), generator=dice)
    return CIFAR10(
        (colours[labels] + torch.randint(-20, 21, (count, 3, SIDE, SIDE), generator=dice)).byte(), labels.long()
    )


def trainer(folder: Path, *changes: dict[str, Any], base: dict[str, Any] = RUN) -> Trainer:
    config = read(TrainConfig, merged(base, *changes), "config")
    source = CIFAR10Source(images()) if config.data["kind"] == "cifar10" else None
    return Trainer(config, folder, Ranks(device=torch.device("cuda", 0)), source=source, quiet=True)


def state(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().float().cpu().clone() for name, tensor in run.state().items()}


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of any weight or running mean, in shares of what all weights can have moved."""
    assert set(one) == set(other)
    return max(float((one[k] - other[k]).abs().max()) for k in one if k.startswith(("network/", "ema/")))


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]


@contextmanager
def full_float32() -> Iterator[None]:
    """Neither TF32 nor another algorithm for each run: what then differs is the order of sums."""
    places: tuple[Any, ...] = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)
    before, fixed = [place.fp32_precision for place in places], torch.backends.cudnn.deterministic
    for place in places:
        place.fp32_precision = "ieee"
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = fixed
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, an operation that makes the CPU wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- captured ------------------------------------------------------------------------------------------------------


def test_captured_steps_are_the_plain_ones(tmp_path: Path) -> None:
    """Also in two micro-steps; and the warm-up of a capture leaves no trace, in no moment and no running mean."""
    with full_float32():
        for name, more in (("whole", {}), ("parts", {"engine": {"accumulate": 2}})):
            plain, captured = trainer(tmp_path / name, more), trainer(tmp_path / f"{name}-captured", more, CAPTURE)
            for run in (plain, captured):
                run.run()
            assert apart(state(plain), state(captured)) < NEAR
            pairs = zip(log_of(plain.folder), log_of(captured.folder), strict=True)
            for a, b in pairs:
                assert abs(a["loss"] - b["loss"]) < 1e-3 * a["loss"]
                assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-2 * a["grad_norm"]
            counts = {float(v) for k, v in state(captured).items() if k.endswith("/step")}
            assert counts == {8.0}


def test_a_captured_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """In the same trainer, whose graph reads the tensors that it was captured with; and in a new one. With dropout."""
    drop = {"task": {"network": {"dropout": 0.3}}}
    with full_float32():
        straight = trainer(tmp_path / "straight", CAPTURE, drop)
        straight.run()
        same = trainer(tmp_path / "same", CAPTURE, drop)
        same.run(until=4)
        places = {name: tensor.data_ptr() for name, tensor in same.live().items()}
        with torch.no_grad():
            for parameter in same.network.parameters():
                parameter.zero_()  # its checkpoint knows better
        same.run()
        assert {name: tensor.data_ptr() for name, tensor in same.live().items()} == places
        trainer(tmp_path / "new", CAPTURE, drop).run(until=4)
        new = trainer(tmp_path / "new", CAPTURE, drop)
        new.run()
        assert apart(state(straight), state(same)) < NEAR
        assert apart(state(straight), state(new)) < NEAR


def test_running_means_inside_the_network_do_not_disturb_its_training(tmp_path: Path) -> None:
    x, t = torch.randn(4, 3, SIDE, SIDE, device="cuda"), torch.full((4,), 500.0, device="cuda")
    with full_float32():
        left, asked = trainer(tmp_path / "left", CAPTURE), trainer(tmp_path / "asked", CAPTURE)
        left.run()
        asked.run(until=4)
        assert asked.ema is not None
        own = asked.network(x, t)
        for length in asked.config.ema:
            with asked.ema.inside(length) as network, torch.no_grad():
                mean = network.eval()(x, t)
                network.train()
            assert not torch.equal(mean, own)
        assert torch.equal(asked.network(x, t), own)
        asked.run()
        assert apart(state(left), state(asked)) < NEAR


def test_a_captured_step_waits_for_nothing(tmp_path: Path) -> None:
    """Logging and running means included: else the GPU idles while Python prepares the next step."""
    run = trainer(tmp_path / "run", CAPTURE)
    run.run(until=2)
    batches = [run.prepare(step) for step in range(2, 6)]
    run.step(2, batches[0])
    torch.cuda.synchronize()
    with no_waiting():
        for step, asked in enumerate(batches[1:], 3):
            run.step(step, asked)


def test_bfloat16_compiled_and_captured_learns(tmp_path: Path) -> None:
    """And compiled without a capture it learns the same."""
    small = {"block_out_channels": [16], "down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"]}
    fast = {
        "task": {"network": small},  # soon compiled
        "steps": 120,
        "batch": 64,
        "engine": {"dtype": "bf16", "compile": True},
        "log": {"every": 20, "checkpoint_every": 0},
    }
    for name, more in (("captured", CAPTURE), ("fed", {})):
        trainer(tmp_path / name, fast, more).run()
    captured, fed = ([line["loss"] for line in log_of(tmp_path / name)] for name in ("captured", "fed"))
    assert captured[-1] < 0.7 * captured[0]
    assert all(abs(a - b) < 0.1 * a for a, b in zip(captured, fed, strict=True))


# --- fed -----------------------------------------------------------------------------------------------------------


def fed(run: Trainer, count: int) -> list[list[dict[str, torch.Tensor]]]:
    """What a feed gives to a stream that is far behind: each batch is read late, and then let go."""
    late = []
    with Feed(run.prepare, 0, count, device=run.ranks.device) as feed:
        for asked in feed:
            torch.cuda._sleep(20_000_000)  # some 10 ms, in which the feed makes more
            late.append([{name: tensor.clone() for name, tensor in part.items()} for part in asked])
            del asked
    return late


def test_a_feed_gives_the_batches_of_the_steps(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", CAPTURE, {"batch": 64})
    run.run(until=1)
    for step, late in enumerate(fed(run, 12)):
        (now,) = run.prepare(step)
        assert all(tensor.is_cuda for tensor in now.values())
        assert set(late[0]) == set(now)
        assert all(torch.equal(late[0][name], now[name]) for name in now)


def test_a_painter_that_is_compiled_paints_the_same(tmp_path: Path) -> None:
    """Within rounding; and a feed's thread meets the code that the main thread compiled."""
    styles = ("flat", "outlined", "soft")
    scenes = world.sample(torch.arange(64, device="cuda"), 3, "any", styles)
    plain, fast = renderer.render_dense(scenes, 64, styles), renderer.render_dense(scenes, 64, styles, compile=True)
    assert torch.allclose(world.render(scenes, 64), plain, rtol=0, atol=2e-4)
    # A distance is right to some 1e-6; over 64 pixels, in −1 … 1.
    assert torch.allclose(plain, fast, rtol=0, atol=2e-4)
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with Feed(lambda _: renderer.render_dense(scenes, 64, styles, compile=True), 0, 3, device="cuda") as feed:
        assert all(torch.equal(made, fast) for made in feed)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == count


# --- other tasks ---------------------------------------------------------------------------------------------------

SCENES: dict[str, Any] = {"kind": "scenes", "size": 32, "seed": 5, "objects": [1]}
VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKL",
    "sample_size": 32,
    "block_out_channels": [16, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "norm_num_groups": 4,
}
UNET: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 16,
    "block_out_channels": [16, 32],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "attention_head_dim": 2,
    "norm_num_groups": 8,
}
PIXART: dict[str, Any] = {
    "_class_name": "PixArtTransformer2DModel",
    "sample_size": 16,
    "patch_size": 2,
    "out_channels": 4,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 32,
}
ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
OTHER: dict[str, Any] = {
    "data": SCENES,
    "steps": 60,
    "batch": 32,
    "ema": [256.0],
    "optimizer": {"rate": RATE, "warmup": 5},
    "engine": {"dtype": "bf16", "capture": True},
    "log": {"every": 10, "checkpoint_every": 0, "pictures_every": 30, "pictures": 4, "tensorboard": False},
}


def test_a_vae_is_captured_with_its_moments(tmp_path: Path) -> None:
    """They are changed within the graph, as often as there are steps, and put back after the warm-up."""
    run = trainer(tmp_path / "run", {"task": {"kind": "autoencoder", "network": VAE}}, base=OTHER)
    run.run()
    losses = [line["loss"] for line in log_of(tmp_path / "run")]
    assert losses[-1] < 0.8 * losses[0]
    assert isinstance(run.network, Autoencoder)
    assert int(run.network.steps) == 60
    with torch.no_grad():
        latents = run.network.vae.encode(run.prepare(59)[0]["images"]).mean
    mean, deviation = run.network.spread()
    assert torch.allclose(mean, latents.mean((0, 2, 3)), rtol=0, atol=float(0.5 * deviation.max()))
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_text_denoisers_are_captured(tmp_path: Path) -> None:
    """A UNet that learns with its text encoder, then a PixArt that reads the encoder of that run, frozen, in its
    feed; both over a VAE that encodes in the feed."""
    scenes_tokenizer(40).save(tmp_path / "tokenizer")
    save_component(fresh(VAE, seed=3), tmp_path / "vae")
    task = {
        "kind": "text_denoiser",
        "vae": str(tmp_path / "vae"),
        "objective": {"schedule": {"name": "cosine"}, "target": "v", "dropout": 0.2, "weighting": {"kind": "min_snr"}},
        "sampling": {"sampler": "dpmpp_2m", "grid": "trailing", "steps": 4, "guidance": 3.0},
        "prompts": ["a red star", "a large blue circle"],
    }
    joint = {"encoder": ENCODER, "tokenizer": str(tmp_path / "tokenizer"), "train": True}
    frozen = {"folder": str(tmp_path / "unet" / "model")}
    for name, network, text in (("unet", UNET, joint), ("pixart", PIXART, frozen)):
        run = trainer(tmp_path / name, {"task": {**task, "network": network, "text": text}}, base=OTHER)
        run.run()
        losses = [line["loss"] for line in log_of(tmp_path / name)]
        assert losses[-1] < 0.8 * losses[0]
        assert (tmp_path / name / "model" / "model_index.json").is_file()
        assert len(list((tmp_path / name / "pictures").iterdir())) == 2
        late, now = fed(run, 3), [run.prepare(step) for step in range(3)]
        for a, b in zip(late, now, strict=True):
            # cuDNN may choose another algorithm in another thread: what the VAE says differs by bfloat16's rounding
            assert all(torch.allclose(a[0][k].float(), b[0][k].float(), rtol=0, atol=0.05) for k in b[0])


def main(names: list[str]) -> int:
    """Each test in a folder of its own, with its seconds; the number of those that failed."""
    failed = 0
    for name, test in list(globals().items()):
        if name.startswith("test_") and (not names or name in names):
            begun, words = time.perf_counter(), "passed"
            with tempfile.TemporaryDirectory() as folder:
                try:
                    partial(test, Path(folder))()
                except Exception:
                    failed, words = failed + 1, "FAILED"
                    traceback.print_exc()
            print(f"{name}: {words} in {time.perf_counter() - begun:.1f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
