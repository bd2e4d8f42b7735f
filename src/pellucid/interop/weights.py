"""Weights: files of tensors → dicts, mapped and not copied; dicts → networks, strictly and without a second copy.

A pickle is opened only by torch's restricted reader: one that holds code is refused, and nothing of it runs.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import check_file, open_file, parse_object, read_bytes
from pellucid.models.quantize import FP8

_MAX_INDEX_BYTES = 64 * 2**20
_MAX_SHARDS, _MAX_NAME = 10_000, 255  # files of one index, and bytes of a file's name
_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")  # diffusers', transformers', transformers' pickles
PICKLES = (".bin", ".ckpt", ".pt", ".pth")
_ENDINGS = (".safetensors", ".safetensors.index.json", *PICKLES)
_LFS_POINTER = b"version https://git-lfs"
NOT_WEIGHTS = re.compile(r"(^|\.)position_ids$")  # a table of 0, 1, 2, … that old CLIP files carry
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_N = TypeVar("_N", bound=nn.Module)


def dtype_named(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A torch dtype from itself or its name."""
    if dtype == FP8:
        must = f"one of {', '.join(DTYPES)} here"
        raise PellucidError(rule("dtype", must, FP8, "fp8 is for sampling from a whole model: pellucid.load."), "dtype")
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and (found is None or not found.is_floating_point or found.itemsize < 2):
        raise PellucidError(rule("dtype", f"one of {', '.join(DTYPES)}", str(dtype)), "dtype")
    return found


# Files


def read(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file. Those of safetensors and of zipped pickles stay on disk until they are used."""
    kind = kind_of(path)
    if kind == "safetensors":
        tensors = read_safetensors(path)
    else:
        tensors = _tensors_in(read_pickle(path, zipped=kind == "zip"), path)
    if not tensors:
        raise _refusal(path, "at least one tensor", "none")
    return tensors


def kind_of(path: Path) -> str:
    """What a file is by its first bytes, whatever its name says."""
    try:
        with open_file(path, f"weights in {path.name}", "weights-file") as file:
            head, size = file.read(64), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _refusal(path, "a file that can be read", str(path), f"{error.strerror or error}.") from None
    if head.startswith(_LFS_POINTER):
        advice = "The clone did not fetch them: run `git lfs pull` in that folder, or download the file."
        raise _refusal(path, "the tensors themselves", "a git-LFS pointer of a few lines", advice, "weights-lfs")
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    if head[8:9] == b"{" and 8 + int.from_bytes(head[:8], "little") <= size:
        return "safetensors"  # before pickles: one header in 32 has a length that begins with their first byte
    if head.startswith(b"\x80"):
        return "pickle"
    if head[8:9] == b"{":
        return "safetensors"  # cut off: its reader says so
    raise _refusal(path, "a safetensors file or a torch pickle", head[:16] or "an empty file")


def _refusal(path: Path, must: str, got: object, advice: str = "", code: str = "weights-file") -> PellucidError:
    return PellucidError(rule(f"weights in {path.name}", must, got, advice), code)


@contextmanager
def _safetensors(path: Path) -> Iterator[Any]:
    """A safetensors file, open; what its reader refuses inside is an error that names the file."""
    check_file(path, f"weights in {path.name}", "weights-file")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise _broken(path, error) from None


def read_safetensors(path: Path) -> dict[str, Tensor]:
    with _safetensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def metadata_of(path: Path) -> dict[str, str]:
    """The words in a safetensors header; nothing for a pickle."""
    if kind_of(path) != "safetensors":
        return {}
    with _safetensors(path) as file:
        return dict(file.metadata() or {})


def shapes_of(path: Path) -> list[tuple[int, ...]]:
    """The shapes of the tensors in a safetensors file."""
    with _safetensors(path) as file:
        return [tuple(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118


def _broken(path: Path, error: Exception) -> PellucidError:
    words = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    return PellucidError(
        f"weights in {path.name} must be a complete file; got one that is truncated or corrupt ({words}). "
        "Download it again.",
        "weights-corrupt",
    )


def read_pickle(path: Path, *, zipped: bool, what: str = "weights") -> Any:
    """What a pickle holds: torch's restricted reader opens it, and nothing in it runs."""
    if zipped:
        _check_zip(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old pickle protocols: what was read is checked later
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError:
        raise PellucidError(
            f"{what} in {path.name} must be tensors alone; got a pickle with code or other objects in it, "
            "and nothing of it was run. Use a .safetensors file.",
            "weights-pickle",
        ) from None
    except Exception as error:  # a malformed pickle makes its reader fail in any way
        raise _broken(path, error) from None


def _check_zip(path: Path) -> None:
    """torch stores and never compresses: sizes beyond the file's own are a trap."""
    try:
        with zipfile.ZipFile(path) as archive:
            claimed = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise _broken(path, error) from None
    if claimed > path.stat().st_size:
        raise _broken(path, ValueError(f"claims {claimed} bytes in {path.stat().st_size}"))


def _tensors_in(held: Any, path: Path) -> dict[str, Tensor]:
    """The state dict of a checkpoint: the whole of it, or its `state_dict`; numbers such as a step count are left."""
    if isinstance(held, Mapping) and isinstance(held.get("state_dict"), Mapping):
        held = held["state_dict"]
    if not isinstance(held, Mapping):
        raise _refusal(path, "a dict of tensors", type(held).__name__)
    found = {str(name): value for name, value in held.items() if isinstance(value, Tensor)}
    others = [str(name) for name, value in held.items() if not isinstance(value, Tensor | int | float | str | None)]
    if others:
        raise _refusal(path, "a dict of tensors", f"other things too: {some(others)}")
    return found


def some(names: Iterable[str], count: int = 4) -> str:
    """The first few names, and how many there are."""
    found = list(names)
    return ", ".join(found[:count]) + (f", … ({len(found)} in all)" if len(found) > count else "")


# Folders


@dataclass(frozen=True)
class WeightsFile:
    """The weights of one folder: a file or an index of shards, and the variant that it is."""

    path: Path
    variant: str | None


def find(folder: Path, variant: str | None = None) -> WeightsFile:
    """The weights of a folder: see `choose`."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    chosen = choose(names, variant)
    if chosen is not None:
        return WeightsFile(folder / chosen[0], chosen[1])
    variants = _variants_in(names)
    wanted = f"{_STEMS[0]}.safetensors or {_STEMS[1]}.safetensors" + (f" (variant {variant})" if variant else "")
    raise PellucidError(
        f"weights in {folder.name} must be {wanted}; got {some(names) or 'an empty folder'}."
        + (f" Name the variant: {', '.join(variants)}." if variants else ""),
        "weights-missing",
    )


def choose(names: Iterable[str], variant: str | None = None) -> tuple[str, str | None] | None:
    """The file of the variant that was asked for, else the plain one, else that of the only variant there is."""
    there = set(names)
    variants = _variants_in(there)
    only = variants[0] if variant is None and len(variants) == 1 else None
    for asked in dict.fromkeys((variant, None, only)):
        for name in (_spell(stem, ending, asked) for ending in _ENDINGS for stem in _STEMS):
            if name in there:
                return name, asked
    return None


def _spell(stem: str, ending: str, variant: str | None) -> str:
    """diffusers' spelling: model.fp16.safetensors, but model.safetensors.index.fp16.json."""
    if variant is None:
        return stem + ending
    if ending.endswith(".json"):
        return f"{stem}{ending.removesuffix('json')}{variant}.json"
    return f"{stem}.{variant}{ending}"


def _variants_in(names: Iterable[str]) -> list[str]:
    stems = "|".join(_STEMS)
    whole = re.compile(rf"(?:{stems})\.(?P<variant>[A-Za-z0-9_]+)(?:\.safetensors|\.bin)")
    index = re.compile(rf"(?:{stems})\.safetensors\.index\.(?P<variant>[A-Za-z0-9_]+)\.json")
    hits = (whole.fullmatch(name) or index.fullmatch(name) for name in names)
    return sorted({hit["variant"] for hit in hits if hit} - {"index"})


def read_folder(folder: Path, variant: str | None = None) -> tuple[dict[str, Tensor], WeightsFile]:
    """The tensors of a component's folder."""
    found = find(folder, variant)
    if found.path.name.endswith(".json"):
        return read_shards(found.path), found
    return read(found.path), found


def read_json(path: Path, limit: int = _MAX_INDEX_BYTES) -> dict[str, Any]:
    """The JSON object of a file that another program wrote."""
    text = read_bytes(path, path.name, limit, "json-file")
    if text.startswith(_LFS_POINTER):
        pointer = "it is a git-LFS pointer: run `git lfs pull`"
        raise PellucidError(f"{path.name} must be JSON; {pointer}.", "json-file")
    return parse_object(text, path.name, "json-file", foreign=True)


def read_shards(index: Path) -> dict[str, Tensor]:
    """The tensors of all shards that an index names. Shards are in its folder, nowhere else."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise PellucidError(rule(f"weight_map of {index.name}", "tensor names to file names", places), "weights-index")
    if len(set(places.values())) > _MAX_SHARDS:
        raise PellucidError(rule(f"shards of {index.name}", f"at most {_MAX_SHARDS}", len(places)), "weights-index")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(places.values())):
        if shard in (".", "..") or re.search(r"[/\\:\0]", shard) or len(shard.encode(errors="replace")) > _MAX_NAME:
            raise PellucidError(rule(f"a shard of {index.name}", "a file beside it", shard), "weights-index")
        if not (index.parent / shard).is_file():
            raise PellucidError(
                f"{index.name} must have all its shards beside it; {shard} is missing. Download it.", "weights-shard"
            )
        tensors |= read(index.parent / shard)
    if absent := sorted(set(places) - set(tensors)):
        raise PellucidError(f"shards of {index.name} must hold what it lists; missing {some(absent)}.", "weights-index")
    return tensors


# Networks


def load(
    make: Callable[[], _N],
    tensors: Mapping[str, Tensor],
    *,
    name: str,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> _N:
    """A network with these tensors for weights: frozen, in eval mode, in `dtype` or in the dtype of the file.

    It is sketched on the meta device first, so that names and shapes are checked before anything is allocated.
    """
    network = sketch(make, name)
    tensors = {key: value for key, value in tensors.items() if not NOT_WEIGHTS.search(key)}
    _check(network, tensors, name)
    if any(buffer.is_meta for buffer in _computed_buffers(network)):
        with bare_parameters():
            network = make()
    kind = dtype or _common_dtype(tensors.values(), name)
    place = torch.device(device or "cpu")
    network.load_state_dict({key: placed(value, kind, place) for key, value in tensors.items()}, assign=True)
    return network.to(place).eval().requires_grad_(False)


class _UnfilledParameters(TorchFunctionMode):
    """Leaves parameters unfilled, in this thread: files bring the numbers. On the meta device torch would also import
    its compiler to fill them (800 modules, 0.8 s)."""

    FILLING = ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in self.FILLING:
            return args[0] if args else next(iter((kwargs or {}).values()))
        return function(*args, **(kwargs or {}))


def sketch(make: Callable[[], _N], name: str) -> _N:
    """The network on the meta device: names and shapes, and no memory."""
    try:
        with torch.device("meta"), _UnfilledParameters():
            return make()
    except PellucidError:
        raise
    except (TypeError, ValueError, ArithmeticError, RuntimeError, LookupError, AttributeError) as error:
        words = (str(error) or type(error).__name__).splitlines()[0]
        raise PellucidError(
            f"config of {name} must describe a network; got one that does not: {words}.", "config-value"
        ) from None


def _check(network: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """Every weight is there, none is left over, and each has the shape that the config says."""
    wanted = network.state_dict()
    missing, extra = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or extra:
        words = [f"missing {some(missing)}"] * bool(missing) + [f"unexpected {some(extra)}"] * bool(extra)
        raise PellucidError(f"weights of {name} must fit its config; {'; '.join(words)}.", "weights-keys")
    for key, tensor in tensors.items():
        if tensor.shape != wanted[key].shape:
            raise PellucidError(
                rule(f"{key} of {name}", f"of shape {tuple(wanted[key].shape)}", tuple(tensor.shape)), "weights-shape"
            )


def _computed_buffers(network: nn.Module) -> Iterator[Tensor]:
    """The buffers that no file holds: a network computes them when it is made."""
    for module in network.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None:
                yield buffer


@contextmanager
def bare_parameters() -> Iterator[None]:
    """Networks made inside, in this thread, have parameters without memory but buffers with their values."""
    here = threading.get_ident()

    def strip(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != here:
            return parameter
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(strip)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        hook.remove()


def _common_dtype(tensors: Iterable[Tensor], name: str) -> torch.dtype:
    """One dtype for a network: that of its file, the widest where the file mixes them."""
    kinds = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if any(kind.itemsize < 2 for kind in kinds):
        stored = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise PellucidError(
            rule(f"dtype of {name}", "named for weights of 8 bits", stored, "Pass dtype='float16', for example."),
            "dtype",
        )
    return reduce(torch.promote_types, kinds) if kinds else torch.float32


def placed(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor where and as it is wanted; itself, still mapped, where nothing changes."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    moved = tensor.detach().to(device=device, dtype=kind).contiguous()
    misaligned = moved.device.type == "cpu" and moved.data_ptr() % moved.element_size()
    return moved.clone() if misaligned else moved  # old files do not pad their header
