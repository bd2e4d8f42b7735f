"""A disk that is full, or refuses, and memory that runs out: every command ends in one line that names the file."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pellucid.cli import app
from pellucid.train.config import read
from pellucid.train.denoiser import DenoiserConfig

PIXELS: dict[str, Any] = {
    "_class_name": "UNet2DModel", "sample_size": 8, "block_out_channels": [8], "layers_per_block": 1,
    "down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"], "norm_num_groups": 4, "attention_head_dim": 8,
}  # fmt: skip
TRAIN = """
steps = 2
batch = 2
[task]
kind = "denoiser"
objective = { schedule = { name = "linear" } }
[task.network]
_class_name = "UNet2DModel"
sample_size = 32
block_out_channels = [8]
layers_per_block = 1
down_block_types = ["DownBlock2D"]
up_block_types = ["UpBlock2D"]
norm_num_groups = 4
attention_head_dim = 8
[data]
kind = "scenes"
size = 32
"""
MAKE = ("--steps", "2", "--sampler", "euler", "--device", "cpu")
STUDY = ("--converged-steps", "4", "--path-steps", "4", "--rounds", "1", "--device", "cpu", "--batch", "2")
TUNE = ("--pairs", "4", "--held-out", "4", "--iterations", "1", "--batch", "4", "--teacher", "20", "--steps", "3",
        "--start", "unipc-3:trailing")  # fmt: skip
# name → its words, and the sizes of a file at which the disk is full, so that each of its files is met
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "sample": (("sample", "model", *MAKE, "--out", "out/a.png"), (0, 200)),
    "sample --trace": (("sample", "model", *MAKE, "--out", "out/a.png", "--trace", "out/a.st"), (0, 5000)),
    "plan --save": (("plan", "ddim", "--steps", "4", "--save", "out/a.json"), (0, 200)),
    "plan --plot": (("plan", "ddim", "--steps", "4", "--plot", "out/a.png"), (3000,)),
    "trace timeline": (("trace", "timeline", "run.st", "--out", "out/a.json"), (200,)),
    "study oracle": (
        ("study", "oracle", "--samplers", "ddim", "--grids", "karras", "--schedules", "linear", "--nfe", "4",
         "--points", "16", "--out", "out/study"),
        (0, 200, 600),
    ),
    "study samplers": (
        ("study", "samplers", "--model", "model", "--samplers", "ddim", "--steps", "2", "--out", "out/study", *STUDY),
        (0, 900, 1500),
    ),
    "tune": (("tune", "--model", "model", *TUNE, "--out", "out/plan.json", "--device", "cpu"), (200,)),
    "train": (("train", "train.toml", "--out", "out/run", "--device", "cpu"), (0, 1000, 3000)),
    "lab --starter": (("lab", "01", "--starter", "out/a.py"), (0, 200)),
    "data scenes": (("data", "scenes", "--folder", "out/scenes", "--count", "1"), (0, 200)),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of pixels, a trace of it, and a config of a small training."""
    folder = tmp_path_factory.mktemp("disk")
    table = {"network": PIXELS, "objective": {"schedule": {"name": "linear"}, "target": "eps"}}
    task = read(DenoiserConfig, table, "task").build(3, torch.device("cpu"))
    task.save(task.network, folder / "model")
    words = ["sample", str(folder / "model"), *MAKE, "--out", str(folder / "a.png"), "--trace", str(folder / "run.st")]
    assert CliRunner().invoke(app, words).exit_code == 0
    (folder / "train.toml").write_text(TRAIN, "utf-8")
    return folder


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """The system refuses to write a file beyond this size, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, (_, sizes) in COMMANDS.items() for size in sizes])
def test_a_full_disk_is_one_line_that_names_the_file(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in place.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "out").mkdir()
    with full_at(size):
        said = CliRunner().invoke(app, list(COMMANDS[name][0]), prog_name="pellucid")
    assert said.exception is None or isinstance(said.exception, SystemExit), said.exception
    errors = [line for line in said.stderr.splitlines() if line.startswith("error[")]
    assert (said.exit_code, len(errors), "Traceback" in said.stderr) == (2, 1, False)
    assert "File too large" in errors[0]
    assert any(part in errors[0] for part in ("out/", "checkpoints/", "run/"))
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.endswith(".part")]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [("samplers",), ("plan", "ddim", "--steps", "2", "--json")])
def test_a_full_standard_output_is_one_line(words: tuple[str, ...]) -> None:
    """Also where what is printed waits in a buffer until the end."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "pellucid.cli", *words]
        said = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (said.returncode, said.stderr) == (2, "error[file]: standard output: No space left on device\n")


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 512. TiB for an array"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: …"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:66] . DefaultCPUAllocator: not enough memory: you tried to …"),
        RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904, 8]"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    ],
)
def test_out_of_memory_anywhere_is_one_line(
    place: Path, refuse: Callable[..., str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """In a stage of a run, and where no stage is: while a model is loaded."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("pellucid.pipeline.repeat.load", fail)
        assert refuse("sample", str(place / "model")).startswith("error[out-of-memory]: out of memory")
    with monkeypatch.context() as patch:
        patch.setattr("pellucid.models.unet.UNet.forward", fail)
        patch.setattr("pellucid.pipeline.memory.predict", fail)
        said = refuse("sample", str(place / "model"), "--device", "cpu")
    assert said.startswith("error[out-of-memory]: memory must suffice for stage denoise; the device ran out of it.")


def test_another_error_is_not_called_memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("pellucid.models.unet.UNet.forward", fail)
    said = CliRunner().invoke(app, ["sample", str(place / "model"), "--device", "cpu"])
    assert isinstance(said.exception, RuntimeError)
