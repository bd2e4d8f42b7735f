"""The loop: it learns, it goes on where it was to the bit, and it refuses in one line without touching a file."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from small_runs import (
    CONDITIONAL,
    NETWORK,
    SIDE,
    bytes_of,
    config,
    images,
    log_of,
    model,
    same,
    saved,
    trainer,
)
from torch import nn

import pellucid
from pellucid import PellucidError
from pellucid.train.cifar10 import CIFAR10, CIFAR10Source
from pellucid.train.config import chosen
from pellucid.train.draws import Draws
from pellucid.train.kinds import TASKS
from pellucid.train.objective import BatchLoss
from pellucid.train.source import Batch
from pellucid.train.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `small_runs`, never stopped."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    trainer(folder).run()
    return folder


def refused(run: Trainer, until: int | None = None) -> tuple[str, str]:
    with pytest.raises(PellucidError) as error:
        run.run(until)
    assert "\n" not in str(error.value)
    return error.value.code, str(error.value)


def task_of(*changes: dict[str, Any]) -> Any:
    made = config(*changes)
    return chosen(made.task, TASKS, "task").build(made.seed, CPU)


# --- it learns ---------------------------------------------------------------------------------------------------


def test_the_loss_falls(tmp_path: Path) -> None:
    """From 1, which a network that says nothing costs on eps, to well below it."""
    done = trainer(tmp_path / "run", {"steps": 50, "log": {"every": 10, "checkpoint_every": 0}}).run()
    losses = [line["loss"] for line in log_of(tmp_path / "run")]
    assert (done.steps, done.skipped) == (50, 0)
    assert losses[0] == pytest.approx(1.0, abs=0.1)
    assert losses[-1] < 0.7


def test_a_line_of_the_log_is_what_happened(tmp_path: Path) -> None:
    """Recomputed by hand: two steps, their losses, norms, errors by level."""
    run = trainer(tmp_path / "run", {"steps": 2, "ema": []})
    run.run()
    (line,) = log_of(tmp_path / "run")
    again, losses, norms = trainer(tmp_path / "other", {"steps": 2, "ema": []}), [], []
    for step in range(2):
        (asked,) = again.prepare(step)
        loss = again.task.loss(again.network, asked).loss
        again.network.zero_grad()
        loss.backward()
        grads = torch.cat([p.grad.flatten() for p in again.network.parameters() if p.grad is not None])
        losses.append(float(loss.detach()))
        norms.append(float(grads.norm()))
        again.step(step, [asked])
    assert (line["step"], line["images"]) == (2, 16)
    assert line["loss"] == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert line["loss_std"] == pytest.approx(abs(losses[0] - losses[1]) / 2, rel=1e-4)
    assert line["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-5)
    assert line["grad_norm_std"] == pytest.approx(abs(norms[0] - norms[1]) / 2, rel=1e-3)
    assert line["rate"] == pytest.approx(2e-3 * 2 / 4)  # half way up
    assert sum(row["count"] for row in line["levels"]) == 16
    mean = sum(row["count"] * row["mean"] for row in line["levels"]) / 16
    assert mean == pytest.approx(line["loss"], rel=1e-6)  # uniform weights: the loss is the mean of the errors


def test_clipping_bounds_the_update(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", {"optimizer": {"clip": 1e-3}})
    norm = run.one_step(run.prepare(0))[1]
    clipped = torch.cat([p.grad.flatten() for p in run.network.parameters() if p.grad is not None]).norm()
    assert float(norm) > 0.1  # what is logged is the norm before
    assert float(clipped) == pytest.approx(1e-3, rel=1e-3)


def test_no_thread_runs_beside_a_compiler(straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of every run compiles; the feed begins after it, and the steps are the same."""
    monkeypatch.setattr(torch, "compile", lambda network, **_: network)
    run, beside = trainer(tmp_path / "run", {"engine": {"compile": True}}), []

    def advance(asked: Any) -> Any:
        beside.append(any(thread.name == "pellucid-feed" for thread in threading.enumerate()))
        return run.one_step(asked)

    run.advance = advance
    run.run(until=3)
    run.run(until=4)
    run.run()
    assert [beside[i] for i in (0, 3, 4, 5)] == [False, False, False, True]  # run(until=4) is one step
    assert same(saved(tmp_path / "run", 12), saved(straight, 12))


# --- it goes on --------------------------------------------------------------------------------------------------


def test_stopped_and_gone_on_is_the_straight_run(straight: Path, tmp_path: Path) -> None:
    """To the bit: weights, moments, running means, the model that comes out, and the log."""
    folder = tmp_path / "run"
    for until, done in ((4, 4), (4, 4), (2, 4), (6, 6), (None, 12), (None, 12)):
        assert trainer(folder).run(until).steps == done
    assert same(saved(folder, 12), saved(straight, 12))
    assert same(model(folder), model(straight))
    assert log_of(folder) == log_of(straight)
    assert (folder / "config.json").read_bytes() == (straight / "config.json").read_bytes()


@pytest.mark.parametrize("broken", [3, 5, 8, 11])
def test_broken_off_at_any_step_is_the_straight_run(straight: Path, tmp_path: Path, broken: int) -> None:
    """An error between two checkpoints: the steps since the last one come again, and their lines of the log."""
    run = trainer(tmp_path / "run")
    step = run.step

    def fails(number: int, asked: Any) -> None:
        if number == broken:
            raise RuntimeError("broken off")
        step(number, asked)

    run.step = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="broken off"):
        run.run()
    assert trainer(tmp_path / "run").run().steps == 12
    assert same(saved(tmp_path / "run", 12), saved(straight, 12))
    assert log_of(tmp_path / "run") == log_of(straight)


def test_a_longer_run_is_the_same_run(straight: Path, tmp_path: Path) -> None:
    assert trainer(tmp_path / "run", {"steps": 8}).run().steps == 8
    assert (tmp_path / "run" / "model").is_dir()
    trainer(tmp_path / "run").run()
    assert same(saved(tmp_path / "run", 12), saved(straight, 12))
    assert same(model(tmp_path / "run"), model(straight))  # the shorter run's is replaced


def test_a_damaged_checkpoint_is_passed_over(straight: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "run"
    trainer(folder).run(8)
    (folder / "checkpoints" / "step-00000008" / "rank-00000.safetensors").write_bytes(b"torn")
    run = trainer(folder)
    run.quiet = False
    run.run()
    assert "damaged checkpoint, so the one before it is taken: step-00000008" in capsys.readouterr().err
    assert same(saved(folder, 12), saved(straight, 12))
    assert log_of(folder) == log_of(straight)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_kept(tmp_path: Path) -> None:
    """Also by a longer config, which would be written in the place of the one that began it."""
    folder = tmp_path / "run"
    trainer(folder).run(8)
    for step in (4, 8):
        (folder / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors").write_bytes(b"torn")
    before = bytes_of(folder)
    for change in ({}, {"steps": 20}):
        code, line = refused(trainer(folder, change))
        assert code == "checkpoint-damaged"
        assert "all are damaged (step-00000008: rank-00000.safetensors" in line
        assert ", step-00000004: " in line
        assert line.endswith(f"Remove {folder / 'checkpoints'} to start over, or choose another --out.")
        assert bytes_of(folder) == before


def test_a_mean_that_is_longer_than_the_run_is_named(tmp_path: Path, capsys: Any) -> None:
    run = trainer(tmp_path / "run", {"ema": [1, 100_000]})
    run.quiet = False
    run.run()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ema ")]
    assert len(said) == 1
    assert said[0].startswith("ema 100,000 is long for a run of ")


def test_another_seed_is_another_run(straight: Path, tmp_path: Path) -> None:
    trainer(tmp_path / "run", {"seed": 1}).run()
    assert not same(model(tmp_path / "run"), model(straight))


# --- how it runs does not matter ---------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_changes_nothing_but_rounding(tmp_path: Path, accumulate: int) -> None:
    """A large eps keeps AdamW from blowing up the rounding of gradients that are nearly 0."""
    steady: dict[str, Any] = {"optimizer": {"eps": 1e-3}, "steps": 6, "log": {"every": 1}}
    runs = [trainer(tmp_path / str(n), steady, {"engine": {"accumulate": n}}) for n in (1, accumulate)]
    for run in runs:
        run.run()
    one, other = (saved(run.folder, 6) for run in runs)
    for name in one:
        assert torch.allclose(one[name].float(), other[name].float(), atol=1e-5, rtol=1e-5), name
    for a, b in zip(*(log_of(run.folder) for run in runs), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert [row["count"] for row in a["levels"]] == [row["count"] for row in b["levels"]]


def test_recomputed_activations_give_the_same_gradients(tmp_path: Path) -> None:
    """With dropout: the second pass must draw what the first drew."""
    dropout = {"task": {"network": {"dropout": 0.3}}}
    plain, again = (trainer(tmp_path / str(on), dropout, {"engine": {"recompute": on}}) for on in (False, True))
    for step in range(3):
        for run in (plain, again):
            run.step(step, run.prepare(step))
        grads = [[p.grad for p in run.network.parameters()] for run in (plain, again)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    again.run(1)
    assert (tmp_path / "True" / "checkpoints" / "step-00000001").is_dir()


def test_a_network_with_dropout_goes_on_to_the_bit(tmp_path: Path) -> None:
    dropout = {"task": {"network": {"dropout": 0.3}}}
    trainer(tmp_path / "one", dropout).run()
    for until in (4, None):
        torch.rand(3)  # whatever else draws in between
        trainer(tmp_path / "two", dropout).run(until)
    assert same(saved(tmp_path / "one", 12), saved(tmp_path / "two", 12))


def test_bf16_trains_float32_weights(tmp_path: Path, straight: Path) -> None:
    """Its losses are those of float32 to three digits, and not the same ones."""
    trainer(tmp_path / "run", {"engine": {"dtype": "bf16"}}).run()
    assert all(tensor.dtype == torch.float32 for tensor in model(tmp_path / "run").values())
    half, full = ([line["loss"] for line in log_of(folder)] for folder in (tmp_path / "run", straight))
    assert half == pytest.approx(full, rel=2e-2)
    assert half != full


# --- what comes out ----------------------------------------------------------------------------------------------


def test_the_model_is_the_first_running_mean_and_loads(straight: Path) -> None:
    held, shipped = saved(straight, 12), model(straight)
    means = {name: held[f"ema/40.0/{name}"] for name in shipped}
    assert same(shipped, means)
    assert not same(shipped, {name: held[f"network/{name}"] for name in shipped})
    pipe = pellucid.load(straight / "model")
    images = pipe(seed=3, steps=2).images
    assert images[0].size == (SIDE, SIDE)


def test_a_loaded_model_answers_as_the_trained_network(straight: Path) -> None:
    run = trainer(straight)
    run.resume()
    x, time = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)), torch.tensor([3.0, 80.0])
    with torch.no_grad():
        wanted = run.with_means(lambda network: network(x, time))
        loaded = pellucid.load(straight / "model").components.network
        assert torch.allclose(loaded(x, time), wanted, atol=1e-6)  # kernels round by where weights lie in memory
    assert run.network.training  # and the network is as it was


def test_a_saved_model_is_trained_further(tmp_path: Path, straight: Path) -> None:
    """Its weights are the first ones, in float32, and all of them are trained."""
    further = {"task": {"network": {}, "start": str(straight / "model")}, "steps": 2}
    run = trainer(tmp_path / "further", further)
    assert same(dict(run.network.state_dict()), model(straight))
    assert all(weight.requires_grad for weight in run.network.parameters())
    run.run()
    moved = model(tmp_path / "further")
    assert not any(torch.equal(moved[name], held) for name, held in model(straight).items())


@pytest.mark.parametrize(
    ("task", "code"),
    [
        ({"start": "runs/model"}, "config-value"),
        ({"network": {}}, "config-value"),
        ({"network": {}, "start": "."}, "not-a-component"),
        ({"network": {"_class_name": "UNet2DConditionModel", "cross_attention_dim": 8}}, "condition"),
    ],
)
def test_a_bad_beginning_is_one_line(tmp_path: Path, task: dict[str, Any], code: str) -> None:
    with pytest.raises(PellucidError) as caught:
        trainer(tmp_path / "run", {"task": task})
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_without_means_the_weights_themselves_are_shipped(tmp_path: Path) -> None:
    trainer(tmp_path / "run", {"ema": [], "steps": 2}).run()
    held, shipped = saved(tmp_path / "run", 2), model(tmp_path / "run")
    assert same(shipped, {name: held[f"network/{name}"] for name in shipped})


def test_images_on_the_way(tmp_path: Path, straight: Path) -> None:
    """They come when they are due, a resumed run draws the same, and drawing leaves the run alone."""
    log = {"log": {"pictures_every": 4, "pictures": 5, "tensorboard": True}}
    folder = tmp_path / "run"
    trainer(folder, log).run(8)
    sheets = sorted(path.name for path in (folder / "pictures").iterdir())
    assert sheets == ["step-00000004.png", "step-00000008.png"]
    with Image.open(folder / "pictures" / sheets[0]) as found:
        assert found.size == (3 * SIDE + 2, 2 * SIDE + 1)
        assert len(found.getcolors(10_000)) > 50
    first = (folder / "pictures" / sheets[1]).read_bytes()
    for path in (folder / "pictures" / sheets[1], *(folder / "checkpoints" / "step-00000008").iterdir()):
        path.unlink()  # as if killed after step 7
    trainer(folder, log).run()
    assert (folder / "pictures" / sheets[1]).read_bytes() == first
    assert same(saved(folder, 12), saved(straight, 12))
    assert len(list((folder / "tensorboard").iterdir())) >= 1


@pytest.mark.parametrize(
    ("objective", "sampling", "kind"),
    [
        ({"schedule": {"name": "linear", "num_train": 100}, "target": "v"}, {"steps": 2}, "DDIMScheduler"),
        (
            {"schedule": {"name": "linear", "num_train": 100}, "target": "v"},
            {"grid": "beta", "steps": 2},  # which diffusers' DDIM does not have
            "DDIMScheduler",
        ),
        (
            {"schedule": {"name": "flow"}, "target": "flow", "times": {"kind": "logit_normal"}},
            {"sampler": "flow_euler", "grid": "trailing", "steps": 2},
            "FlowMatchEulerDiscreteScheduler",
        ),
        (
            {"schedule": {"name": "edm"}, "target": "edm", "times": {"kind": "edm", "mean": -1.2, "std": 1.2}},
            {"sampler": "euler", "grid": "karras", "steps": 2},
            "EDMEulerScheduler",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_targets_are_shipped_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, objective: Any, sampling: Any, kind: str
) -> None:
    task = {"kind": "denoiser", "network": NETWORK, "objective": objective, "sampling": sampling}
    trainer(tmp_path / "run", {"steps": 2, "task": None}, {"task": task}).run()
    scheduler = json.loads((tmp_path / "run" / "model" / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["_class_name"] == kind
    assert scheduler.get("timestep_spacing", "leading") == "leading"
    told = "saved with the grid leading: diffusers' DDIM has no beta"
    assert (told in caplog.text) == (sampling.get("grid") == "beta")
    pipe = pellucid.load(tmp_path / "run" / "model")
    assert pipe(seed=3, steps=2).images[0].size == (SIDE, SIDE)


# --- conditions --------------------------------------------------------------------------------------------------


def test_labels_are_told_and_dropped_ones_are_the_null_label(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", CONDITIONAL, {"task": {"objective": {"dropout": 0.5}}})
    told, dropped = [], []
    for step in range(40):
        (asked,) = run.prepare(step)
        draws = Draws(0, step, 8)
        true = run.source.batch(run.order.step(step), draws, CPU).labels
        null = asked["labels"] == 4
        assert torch.equal(null, draws.uniform("dropout") < 0.5)
        assert torch.equal(asked["labels"][~null], true[~null])
        told += asked["labels"].tolist()
        dropped += null.tolist()
    assert set(told) == {0, 1, 2, 3, 4}
    assert sum(dropped) / len(dropped) == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(320))
    before = run.network.class_embedding.weight.detach().clone()  # type: ignore[union-attr]
    for step in range(4):  # the first steps only open what starts at zero
        run.step(step, run.prepare(step))
    assert not torch.equal(run.network.class_embedding.weight, before)  # type: ignore[union-attr]


def test_a_conditional_run_draws_and_loads(tmp_path: Path) -> None:
    changes = (CONDITIONAL, {"steps": 2, "log": {"pictures_every": 2, "pictures": 6}})
    trainer(tmp_path / "run", *changes).run()
    pipe = pellucid.load(tmp_path / "run" / "model")
    images = pipe(seed=3, steps=2, label=1).images
    assert images[0].size == (SIDE, SIDE)


def test_noise_offset_moves_whole_channels(tmp_path: Path) -> None:
    plain, moved = (trainer(tmp_path / "run", {"task": {"objective": {"noise_offset": o}}}) for o in (0.0, 0.5))
    difference = moved.prepare(0)[0]["noise"] - plain.prepare(0)[0]["noise"]
    per_channel = difference[:, :, :1, :1]
    assert torch.allclose(difference, per_channel.expand_as(difference), atol=1e-6)
    assert torch.allclose(per_channel, 0.5 * Draws(0, 0, 8).normal("offset", (3, 1, 1)), atol=1e-6)


# --- what is refused ---------------------------------------------------------------------------------------------


class Spoiled:
    """A task whose loss, or gradient, stops being a number at some call."""

    def __init__(self, inner: Any, call: int, what: str) -> None:
        self.inner, self.network, self.left, self.what = inner, inner.network, call, what

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def loss(self, network: nn.Module, asked: Any) -> BatchLoss:
        graded = self.inner.loss(network, asked)
        self.left -= 1
        if self.left:
            return graded
        if self.what == "loss":
            return BatchLoss(graded.loss * math.nan, graded.errors, graded.lam)
        zero = (graded.loss - graded.loss.detach()).abs().sqrt()  # 0, with a slope that is not a number
        return BatchLoss(graded.loss + zero, graded.errors, graded.lam)


@pytest.mark.parametrize(("what", "name"), [("loss", "loss"), ("gradient", "grad_norm")])
def test_a_loss_that_is_no_number_stops_the_run_in_one_line(tmp_path: Path, what: str, name: str) -> None:
    """At the last step before a checkpoint: weights that it spoiled are not saved."""
    folder = tmp_path / "run"
    code, line = refused(trainer(folder, task=Spoiled(task_of(), 8, what)))
    assert code == "loss-nan"
    assert line == f"{name} up to step 8 must be finite; got nan. Lower optimizer.rate; the last good step is 4."
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000004"]
    assert all(tensor.isfinite().all() for tensor in saved(folder, 4).values())
    assert not (folder / "model").exists()
    trainer(folder).run()
    assert [line["step"] for line in log_of(folder)] == [2, 4, 6, 8, 10, 12]


def test_another_config_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trainer(folder).run(4)
    before = bytes_of(folder)
    code, line = refused(trainer(folder, {"optimizer": {"rate": 1e-3}}))
    assert code == "resume-config"
    assert line == f"config must be the one that began {folder}; got another optimizer.rate. Choose another --out."
    many = {"batch": 4, "seed": 1, "optimizer": {"rate": 1, "clip": 0.0, "decay": "cosine"}, "log": {"every": 1}}
    names = "batch, seed, optimizer.rate, optimizer.decay, … (5 in all)"
    assert f"got another {names}. " in refused(trainer(folder, many))[1]
    inside = {"task": {"network": {"block_out_channels": [12]}, "sampling": {"steps": 3}}}
    assert "; got another task.network.block_out_channels, task.sampling.steps. " in refused(trainer(folder, inside))[1]
    assert refused(trainer(folder, {"steps": 3}))[0] == "resume-steps"
    assert bytes_of(folder) == before
    for torn in ("{", "[]", '{"fingerprint": "other", "config": [1]}'):
        (folder / "config.json").write_text(torn, "utf-8")
        code, line = refused(trainer(folder))
        assert code == "resume-config"
        assert "got a config.json that cannot be read" in line
        assert (folder / "config.json").read_text("utf-8") == torn


def test_an_occupied_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine", "utf-8")
    code, line = refused(trainer(tmp_path))
    assert code == "out-taken"
    assert "empty, new, or a run of this config" in line
    assert bytes_of(tmp_path) == {"thesis.txt": b"mine"}
    with pytest.raises(OSError, match="Not a directory"):
        trainer(tmp_path / "thesis.txt").run()


def test_a_run_killed_while_it_claimed_its_folder_starts_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.0123abcd.part.json").write_text('{"finge', "utf-8")
    assert trainer(tmp_path / "run", {"steps": 2}).run().steps == 2


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (
            {"batch": 9, "engine": {"accumulate": 2}},
            "batch-parts",
            "batch must be a multiple of ranks × accumulate (1 × 2)",
        ),
        ({"engine": {"capture": True}}, "capture", "engine.capture must be false without exactly one GPU"),
        ({"ema": [0.0]}, "ema", "EMA lengths must be"),
        ({"ema": [5.0, 5.0]}, "ema", "EMA lengths must be different"),
        ({"task": {"kind": "denoise"}}, "config-value", "Nearest: denoiser"),
        ({"task": {"network": {"_class_name": "UNet3D"}}}, "class", "network._class_name must be one of"),
        ({"task": {"network": {"_class_name": ["x"]}}}, "class", "network._class_name must be one of"),
        ({"task": {"network": {"_class_name": "AutoencoderKL"}}}, "config-key", ""),
        ({"task": {"network": {"layer_per_block": 3}}}, "config-key", "Nearest: "),
        (
            {"task": {"network": {"sample_size": [8, 8]}}},
            "config-missing",
            "network.sample_size must be a whole number",
        ),
        ({"task": {"condition": "labels"}}, "condition", "labels exactly where the network has num_class_embeds"),
        ({"task": {"network": {"num_class_embeds": 4}}}, "condition", "labels exactly where"),
        ({"task": {"condition": "labels", "network": {"num_class_embeds": 1}}}, "condition", "at least 2"),
        ({"task": {"objective": {"dropout": 0.1}}}, "objective", "dropout must be 0 without a condition"),
        ({"task": {"sampling": {"sampler": "ddmi"}}}, "unknown-sampler", "ddim"),
        ({"task": {"sampling": {"grid": "leadin"}}}, "unknown-grid", "leading"),
        ({"task": {"sampling": {"steps": 0}}}, "steps", "steps"),
        ({"task": {"sampling": {"guidance": 3.0}}}, "config-value", "sampling.guidance must be 1"),
        ({"task": {"objective": {"target": "score"}}}, "export", "DDIMScheduler"),
    ],
    ids=str,
)
def test_a_run_that_cannot_be_is_refused_before_it_begins(tmp_path: Path, change: Any, code: str, words: str) -> None:
    with pytest.raises(PellucidError) as error:
        trainer(tmp_path / "run", change)
    assert error.value.code == code
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


class Bare(CIFAR10Source):
    """Pictures without labels."""

    def batch(self, indices: torch.Tensor, draws: Draws, device: torch.device) -> Batch:
        return Batch(super().batch(indices, draws, device).images)


def wide() -> CIFAR10:
    return CIFAR10(torch.zeros(4, 3, SIDE, 2 * SIDE, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        (CIFAR10Source(wide()), "data-shape", "images of the data must be of shape (3, 8, 8); got (3, 8, 16)."),
        (Bare(images()), "data-labels", "data must be with labels"),
        (CIFAR10Source(images(classes=5)), "condition", "num_class_embeds must be above the largest label"),
    ],
    ids=["shape", "labels", "null"],
)
def test_data_that_do_not_fit_are_one_line(tmp_path: Path, source: Any, code: str, words: str) -> None:
    found, line = refused(trainer(tmp_path / "run", CONDITIONAL, source=source))
    assert (found, words in line) == (code, True), line
    assert not (tmp_path / "run").exists()


def test_no_data_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match="examples must be at least 1; got 0") as error:
        trainer(tmp_path / "run", source=CIFAR10Source(images(0)))
    assert error.value.code == "data-empty"
    with pytest.raises(PellucidError, match="CIFAR-10 folder must be one that holds") as error:
        Trainer(config({"data": {"folder": str(tmp_path)}}), tmp_path / "run", trainer(tmp_path / "x").ranks)
    assert error.value.code == "data-missing"
    assert not (tmp_path / "run").exists()
