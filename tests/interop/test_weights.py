"""Weights: what is read is what was written, nothing runs, nothing is copied twice, and every misfit is named."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from pellucid.core.errors import PellucidError
from pellucid.interop import weights

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.tensor([1.5, -2.0]), "n": torch.tensor([3, 4])}


def same(found: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor] = TENSORS) -> bool:
    return found.keys() == tensors.keys() and all(
        torch.equal(found[k], t) and found[k].dtype == t.dtype for k, t in tensors.items()
    )


def code_of(error: pytest.ExceptionInfo[PellucidError]) -> str:
    assert "\n" not in str(error.value)
    return error.value.code


# Files


def test_safetensors(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"modelspec.title": "t"})
    assert same(weights.read(tmp_path / "x.safetensors"))
    assert weights.metadata_of(tmp_path / "x.safetensors") == {"modelspec.title": "t"}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_pickles_of_tensors(tmp_path: Path, nested: bool, zipped: bool) -> None:
    held: Any = {"state_dict": TENSORS, "global_step": 3, "epoch": 1} if nested else TENSORS
    torch.save(held, tmp_path / "x.ckpt", _use_new_zipfile_serialization=zipped)
    assert same(weights.read(tmp_path / "x.ckpt"))
    assert weights.metadata_of(tmp_path / "x.ckpt") == {}


class Trap:
    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.sentinel),)


@pytest.mark.parametrize("way", ["zip", "legacy", "bare", "bare protocol 4"])
def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path: Path, way: str) -> None:
    trap, file = Trap(tmp_path / "ran"), tmp_path / "x.bin"
    if way.startswith("bare"):
        file.write_bytes(pickle.dumps({"a": trap}, protocol=4 if way.endswith("4") else 2))
    else:
        torch.save({"a": torch.ones(1), "b": trap}, file, _use_new_zipfile_serialization=way == "zip")
    with pytest.raises(PellucidError, match=r"x\.bin must be tensors alone.*nothing of it was run") as error:
        weights.read(file)
    assert code_of(error) == "weights-pickle"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("held", [[torch.ones(1)], {"a": [torch.ones(1)]}, {"a": 1}])
def test_a_pickle_of_other_things(tmp_path: Path, held: Any) -> None:
    torch.save(held, tmp_path / "x.pt")
    with pytest.raises(PellucidError, match=r"weights in x\.pt must be") as error:
        weights.read(tmp_path / "x.pt")
    assert code_of(error) == "weights-file"


def test_a_zip_that_swells_is_refused(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as source, zipfile.ZipFile(tmp_path / "y.pt", "w") as bomb:
        for entry in source.infolist():
            bomb.writestr(entry.filename, source.read(entry))
        bomb.writestr("x/data/9", bytes(10**6), compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(PellucidError, match="claims 10") as error:
        weights.read(tmp_path / "y.pt")
    assert code_of(error) == "weights-corrupt"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("written")
    save_file(TENSORS, folder / "safetensors")
    torch.save(TENSORS, folder / "zip")
    return {name: (folder / name).read_bytes() for name in ("safetensors", "zip")}


@given(kind=st.sampled_from(["safetensors", "zip"]), share=st.floats(0, 0.999))
def test_every_truncation_is_one_line(written: dict[str, bytes], kind: str, share: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.safetensors"
        file.write_bytes(written[kind][: int(len(written[kind]) * share)])
        with pytest.raises(PellucidError, match="must be") as error:
            weights.read(file)
    assert code_of(error) in ("weights-corrupt", "weights-file")


@given(place=st.integers(0, 200), byte=st.integers(0, 255))
def test_a_damaged_header_never_gives_another_error(written: dict[str, bytes], place: int, byte: int) -> None:
    damaged = bytearray(written["safetensors"])
    damaged[place % len(damaged)] = byte
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.safetensors"
        file.write_bytes(damaged)
        found: dict[str, torch.Tensor] = {}
        with contextlib.suppress(PellucidError):
            found = weights.read(file)
        assert all(t.nbytes <= len(damaged) for t in found.values())


def test_a_header_that_claims_more_than_the_file(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(PellucidError, match=r"x\.safetensors must be a complete file") as error:
        weights.read(tmp_path / "x.safetensors")
    assert code_of(error) == "weights-corrupt"


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.example/spec/v1\noid sha256:00\nsize 12\n"
    (tmp_path / "model.safetensors").write_bytes(pointer)
    with pytest.raises(PellucidError, match=r"git-LFS pointer.*git lfs pull") as error:
        weights.read(tmp_path / "model.safetensors")
    assert code_of(error) == "weights-lfs"
    (tmp_path / "config.json").write_bytes(pointer)
    with pytest.raises(PellucidError, match="git lfs pull"):
        weights.read_json(tmp_path / "config.json")


@pytest.mark.parametrize("held", [b"", b"<!DOCTYPE html><html>", b"GGUF0000"])
def test_a_file_of_another_kind(tmp_path: Path, held: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(held)
    with pytest.raises(PellucidError, match="a safetensors file or a torch pickle") as error:
        weights.read(tmp_path / "x.safetensors")
    assert code_of(error) == "weights-file"


# Folders


INDEX = "model.safetensors.index.json"
P, F, N = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors", "model.non_ema.safetensors"


@pytest.mark.parametrize(
    ("names", "variant", "chosen"),
    [
        ([P, F], None, (P, None)),
        ([P, F], "fp16", (F, "fp16")),
        ([P], "fp16", (P, None)),
        ([F], None, (F, "fp16")),
        ([F, N], None, None),
        ([F, N], "non_ema", (N, "non_ema")),
        (["model.safetensors", "pytorch_model.bin"], None, ("model.safetensors", None)),
        (["pytorch_model.bin", F], None, ("pytorch_model.bin", None)),
        (["model.safetensors.index.json", "model-00001-of-00002.safetensors"], None, (INDEX, None)),
        (["model.safetensors.index.fp16.json", "x"], None, ("model.safetensors.index.fp16.json", "fp16")),
        (["flax_model.msgpack", "other.safetensors"], None, None),
        ([], None, None),
    ],
)
def test_which_file_is_chosen(
    tmp_path: Path, names: list[str], variant: str | None, chosen: tuple[str, str | None] | None
) -> None:
    assert weights.choose(names, variant) == chosen
    for name in names:
        (tmp_path / name).touch()
    if chosen is not None:
        assert weights.find(tmp_path, variant) == weights.WeightsFile(tmp_path / chosen[0], chosen[1])
        return
    with pytest.raises(PellucidError, match="weights in") as error:
        weights.find(tmp_path, variant)
    assert code_of(error) == "weights-missing"
    assert ("fp16, non_ema" in str(error.value)) == (F in names)


def sharded(folder: Path, places: dict[str, str]) -> Path:
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "model-00001-of-00002.safetensors")
    save_file({k: TENSORS[k] for k in ("a.bias", "n")}, folder / "model-00002-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    return index


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
PLACES = {"a.weight": FIRST, "a.bias": SECOND, "n": SECOND}


def test_shards(tmp_path: Path) -> None:
    sharded(tmp_path, PLACES)
    found, source = weights.read_folder(tmp_path)
    assert same(found)
    assert source.variant is None


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path, PLACES)
    (tmp_path / SECOND).unlink()
    with pytest.raises(PellucidError, match=f"{SECOND} is missing") as error:
        weights.read_folder(tmp_path)
    assert code_of(error) == "weights-shard"


@pytest.mark.parametrize("place", ["../secret.safetensors", "/etc/secret", "sub/x.safetensors", "..\\x", "..", "C:x"])
def test_shards_lie_beside_their_index(tmp_path: Path, place: str) -> None:
    save_file(TENSORS, tmp_path / "secret.safetensors")
    (tmp_path / "model").mkdir()
    index = sharded(tmp_path / "model", {**PLACES, "n": place})
    with pytest.raises(PellucidError, match="a file beside it") as error:
        weights.read_shards(index)
    assert code_of(error) == "weights-index"


@pytest.mark.parametrize("places", [{**PLACES, "gone": FIRST}, {"a": 1}, ["a"], None])
def test_an_index_that_does_not_fit(tmp_path: Path, places: Any) -> None:
    with pytest.raises(PellucidError, match=r"missing gone|tensor names to file names") as error:
        weights.read_shards(sharded(tmp_path, places))
    assert code_of(error) == "weights-index"


@pytest.mark.parametrize("text", ["{", "[1]", '"a"', "[" * 100_000])
def test_json_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(PellucidError, match=r"config\.json must be") as error:
        weights.read_json(tmp_path / "config.json")
    assert code_of(error) == "json-file"


# Networks


class Net(nn.Module):
    """A layer, a buffer that files hold, and one that the network computes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.register_buffer("n", torch.zeros(2, dtype=torch.long))
        self.register_buffer("table", torch.arange(4).float() ** 2, persistent=False)


def test_a_network_takes_the_tensors_themselves() -> None:
    tensors = {k: t.clone() for k, t in TENSORS.items()}
    state = torch.random.get_rng_state()
    net = weights.load(Net, tensors, name="net")
    assert same(net.state_dict())
    assert net.a.weight.data_ptr() == tensors["a.weight"].data_ptr()  # assigned, not copied
    assert torch.equal(net.table, torch.tensor([0.0, 1.0, 4.0, 9.0]))
    assert not net.training
    assert not any(p.requires_grad for p in net.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)  # nothing was drawn to be overwritten


@pytest.mark.parametrize(
    ("stored", "asked", "got"),
    [
        ((torch.float16, torch.float16), None, torch.float16),
        ((torch.float16, torch.float32), None, torch.float32),
        ((torch.float16, torch.bfloat16), None, torch.float32),
        ((torch.float32, torch.float32), torch.bfloat16, torch.bfloat16),
        ((torch.float8_e4m3fn, torch.float32), torch.float16, torch.float16),
    ],
)
def test_one_dtype_a_network(stored: tuple[torch.dtype, ...], asked: torch.dtype | None, got: torch.dtype) -> None:
    first, second = stored
    tensors = {**TENSORS, "a.weight": TENSORS["a.weight"].to(first), "a.bias": TENSORS["a.bias"].to(second)}
    net = weights.load(Net, tensors, name="net", dtype=asked)
    assert {p.dtype for p in net.parameters()} == {got}
    assert net.n.dtype == torch.long
    assert torch.equal(net.a.weight.float(), TENSORS["a.weight"])  # small integers are exact in all of them


def test_eight_bits_want_a_dtype() -> None:
    tensors = {**TENSORS, "a.weight": TENSORS["a.weight"].to(torch.float8_e4m3fn)}
    with pytest.raises(PellucidError, match="dtype of net must be named") as error:
        weights.load(Net, tensors, name="net")
    assert code_of(error) == "dtype"


def test_misaligned_weights_are_moved(tmp_path: Path) -> None:
    """Files of before 2023 do not pad their header."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    header += b" " * ((3 - len(header)) % 8)
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<3f", 1, 2, 3))
    read = weights.read(tmp_path / "x.safetensors")["a"]
    moved = weights.placed(read, torch.float32, torch.device("cpu"))
    assert read.data_ptr() % 4 != 0
    assert moved.data_ptr() % 4 == 0
    assert moved.tolist() == [1.0, 2.0, 3.0]


def test_missing_and_unexpected_names() -> None:
    tensors = {"a.weight": TENSORS["a.weight"], **{f"more.{i}": torch.ones(1) for i in range(7)}}
    with pytest.raises(PellucidError) as error:
        weights.load(Net, tensors, name="net")
    assert str(error.value) == (
        "weights of net must fit its config; missing a.bias, n; "
        "unexpected more.0, more.1, more.2, more.3, … (7 in all)."
    )
    assert code_of(error) == "weights-keys"


def test_a_wrong_shape_is_named() -> None:
    with pytest.raises(PellucidError, match=r"a\.weight of net must be of shape \(2, 3\); got \(3, 2\)") as error:
        weights.load(Net, {**TENSORS, "a.weight": torch.ones(3, 2)}, name="net")
    assert code_of(error) == "weights-shape"


def test_old_position_ids_are_no_weights() -> None:
    assert same(weights.load(Net, {**TENSORS, "embeddings.position_ids": torch.arange(4)}, name="net").state_dict())


def test_a_config_cannot_ask_for_memory_that_the_file_does_not_fill() -> None:
    with pytest.raises(PellucidError, match="must be of shape") as error:
        weights.load(lambda: nn.Linear(10**7, 10**7), {"weight": torch.ones(2), "bias": torch.ones(2)}, name="net")
    assert code_of(error) == "weights-shape"


def test_a_config_that_describes_nothing() -> None:
    with pytest.raises(PellucidError, match="config of net must describe a network") as error:
        weights.load(lambda: nn.Conv2d(3, 3, 1, groups=2), TENSORS, name="net")
    assert code_of(error) == "config-value"


def test_other_threads_make_whole_networks_meanwhile() -> None:
    made: list[nn.Module] = []
    with weights.bare_parameters():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        mine = nn.Linear(2, 2)
    assert mine.weight.is_meta
    assert not made[0].weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize("dtype", ["int8", "half", torch.int64, "float8_e4m3fn"])
def test_dtypes_that_no_network_runs_in(dtype: Any) -> None:
    with pytest.raises(PellucidError, match="dtype must be one of") as error:
        weights.dtype_named(dtype)
    assert code_of(error) == "dtype"
    assert weights.dtype_named("bfloat16") is torch.bfloat16


def test_a_header_whose_length_begins_like_a_pickle_is_no_pickle(tmp_path: Path) -> None:
    """Header lengths are multiples of 8, so one in 32 has the low byte 0x80."""
    path, held = tmp_path / "w.safetensors", {"w": torch.arange(3.0)}
    for filler in range(0, 256, 8):
        save_file(held, path, metadata={"note": "x" * filler})
        if path.read_bytes()[0] == 0x80:
            break
    assert path.read_bytes()[0] == 0x80
    assert weights.kind_of(path) == "safetensors"
    assert torch.equal(weights.read(path)["w"], held["w"])
    assert weights.metadata_of(path)["note"] == "x" * filler


def test_loading_does_not_import_torchs_compiler() -> None:
    """To fill parameters on the meta device torch imports 800 modules: 0.8 s of a load that takes 0.2."""
    code = "import sys, pellucid; pellucid.load('scenes-128'); assert 'torch._dynamo' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
