"""Checks of the weights on disk: names, shapes, dtypes, and numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError
from pellucid.evidence.doctor.checks import Finding, check
from pellucid.evidence.doctor.subject import NEEDS, QUICK, Component, Subject, UnsupportedCheck, dtype_name
from pellucid.interop import single_file, weights
from pellucid.interop.components import KINDS, NETWORK_PARTS
from pellucid.interop.folder import IGNORED
from pellucid.interop.weights import NOT_WEIGHTS, some

_USUAL = (torch.float32, torch.float16, torch.bfloat16)
_SMALL = 2  # bytes: numbers of fewer are compressed, and have to be opened in a dtype that is named
_OUTPUTS = ("conv_out.weight", "proj_out_2.weight", "proj_out.weight")  # of UNets, DiT, PixArt
# Refusals of folders that other findings explain, and refusals that are no fault of the model.
_EXPLAINED = (
    "class", "component-missing", "components-fit", "config-class", "config-groups", "config-key", "config-length",
    "config-missing", "config-unsupported", "config-value", "json-file", "tokenizer-files", "unknown-target",
    "weights-corrupt", "weights-file", "weights-index", "weights-keys", "weights-lfs", "weights-missing",
    "weights-pickle", "weights-shape", "weights-shard", "dtype",
)  # fmt: skip
_FAULTLESS = {
    "pipeline-class": "Open it with diffusers and give the pipeline to pellucid.wrap.",
    "tokenizer-missing": "--tokenizer FOLDER",
}


@check("loading")
def loading(subject: Subject) -> Iterator[Finding]:
    """A model that does not load, for a reason that no other check names."""
    error = subject.refused
    if error is None:
        return
    if error.code == "target-unknown":
        yield Finding(
            "target-unknown",
            "error",
            "nothing says whether the network predicts eps or v",
            (("error", error.code),),
            str(error),
            "Put the model's yaml beside the file, or load it with --target v (768 pixels) or --target eps (512).",
        )
    elif error.code in _FAULTLESS:
        yield Finding(
            "not-supported",
            "note",
            "Pellucid does not open this model as it is",
            (("error", error.code),),
            str(error),
            _FAULTLESS[error.code],
        )
    elif subject.folder is None or error.code not in _EXPLAINED:
        yield Finding(
            "does-not-load",
            "error",
            "the model does not load",
            (("error", error.code),),
            str(error),
            "Do what the cause says; `pellucid inspect MODEL` shows what is there.",
        )


@check("configs of the components")
def configs(subject: Subject, components: Mapping[str, Component]) -> Iterator[Finding]:
    """Keys and values that the component's class does not take."""
    for part, one in _networks(components):
        try:
            one.sketch()
        except PellucidError as error:
            unknown = error.code == "config-key"
            yield Finding(
                "model-config-key" if unknown else "model-config-value",
                "error",
                f"the config of {part} {'has an unknown key' if unknown else 'describes no network'}",
                (("part", part), ("class", one.kind), ("error", error.code)),
                str(error),
                f"Correct or remove it in {part}/config.json.",
            )


def _networks(components: Mapping[str, Component] | None) -> list[tuple[str, Component]]:
    """The components that are networks of ours and whose configs can be read."""
    found = (components or {}).items()
    return [(p, one) for p, one in found if one.config is not None and one.network_kind and p not in IGNORED]


@check("names and shapes of weights")
def names(subject: Subject, components: Mapping[str, Component]) -> Iterator[Finding]:
    """What the config asks for and what the files hold."""
    for part, one in _networks(components):
        try:
            wanted = one.sketch().state_dict()
        except PellucidError:
            continue  # the check of configs reports it
        try:
            held = _tensors_of(one)
        except PellucidError as error:
            title, facts = f"the weights of {part} cannot be read", (("part", part), ("error", error.code))
            yield Finding("weights-file", "error", title, facts, str(error), "Download the file again.")
            continue
        missing, extra = sorted(set(wanted) - set(held)), sorted(set(held) - set(wanted))
        if missing:
            yield _missing_weights(part, missing, len(wanted), one)
        if extra:
            yield _extra_tensors(part, extra, held)
        wrong = [key for key, tensor in held.items() if key in wanted and tensor.shape != wanted[key].shape]
        if wrong:
            yield _wrong_shapes(part, wrong, held, wanted)


def _tensors_of(component: Component) -> dict[str, Tensor]:
    """The weights of a component under today's names; they are read from disk when they are used."""
    assert component.network_kind is not None
    found, _ = weights.read_folder(component.place)
    renamed = KINDS[component.network_kind].rename(found)
    return {name: tensor for name, tensor in renamed.items() if not NOT_WEIGHTS.search(name)}


def _missing_weights(part: str, missing: list[str], count: int, component: Component) -> Finding:
    return Finding(
        "weights-missing",
        "error",
        f"{len(missing)} of {count} weights of {part} are missing",
        (("missing", len(missing)), ("of", count), ("such as", some(missing))),
        f"The config of {part} ({component.kind}) asks for them and the file does not hold them: diffusers would "
        "initialise them at random.",
        "Use the config that was saved with these weights, or the whole file.",
    )


def _extra_tensors(part: str, extra: list[str], tensors: Mapping[str, Tensor]) -> Finding:
    size = sum(tensors[name].numel() for name in extra)
    return Finding(
        "weights-extra",
        "error",
        f"{len(extra)} tensors in the file of {part} belong to no weight",
        (("extra", len(extra)), ("numbers in them", size), ("such as", some(extra))),
        f"The config of {part} has no place for them, so they would have no effect, and Pellucid refuses them.",
        "Use the config that was saved with these weights, or remove the tensors.",
    )


def _wrong_shapes(
    part: str, wrong: list[str], tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> Finding:
    key = wrong[0]
    return Finding(
        "weights-shape",
        "error",
        f"{len(wrong)} weights of {part} have another shape than its config says",
        (("weight", key), ("in the file", str(tuple(tensors[key].shape))),
         ("by the config", str(tuple(expected[key].shape)))),
        f"Config and weights of {part} are of different models, or a key of the config was changed.",
        "Use the config that was saved with these weights.",
    )  # fmt: skip


# --- numbers ---------------------------------------------------------------------------------------------------


def _stored(subject: Subject) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Every component's tensors, or those of a single file; what cannot be read is another check's."""
    if subject.file is subject.folder is None:
        raise UnsupportedCheck(NEEDS["pipeline"])
    if subject.file is not None:
        with suppress(PellucidError):
            yield subject.file.name, weights.read(subject.file)
    for part, one in _networks(subject.components):
        with suppress(PellucidError):
            yield part, _tensors_of(one)


@check("dtypes of weights")
def dtypes(subject: Subject) -> Iterator[Finding]:
    """Dtypes that few models have, and pickles."""
    for part, held in _stored(subject):
        # single files hold counters and tables of whole numbers too
        kinds = {one.dtype for one in held.values() if subject.file is None or one.is_floating_point()}
        odd = [kind for kind in kinds if kind not in _USUAL]
        floats = sorted(dtype_name(kind) for kind in kinds if kind.is_floating_point)
        if odd:
            yield _odd_dtype(part, odd)
        elif len(floats) > 1:
            yield Finding(
                "weights-mixed",
                "note",
                f"the weights of {part} are of several dtypes",
                (("dtypes", ", ".join(floats)),),
                "They are opened in the widest of them, which takes more memory than the file.",
                f"--dtype {floats[0]}, or save them in one dtype",
            )
    yield from _pickles(subject)


def _odd_dtype(part: str, odd: Iterable[torch.dtype]) -> Finding:
    small = any(kind.itemsize < _SMALL or not kind.is_floating_point for kind in odd)
    names = ", ".join(sorted(map(dtype_name, odd)))
    wide = "float64 doubles the memory of float32 and makes no better image."
    packed = "Weights of 8 bits and whole numbers are compressed: only the program that wrote them can read them."
    return Finding(
        "weights-dtype",
        "warning" if small else "note",
        f"the weights of {part} are stored as {names}",
        (("dtypes", names),),
        packed if small else wide,
        "--dtype float16, or the weights as they were trained" if small else "Save them as float32 or float16.",
    )


def _pickles(subject: Subject) -> Iterator[Finding]:
    places = [subject.file] if subject.file is not None else []
    for _, one in _networks(subject.components):
        with suppress(PellucidError):
            places.append(weights.find(one.place).path)
    found = [path for path in places if _is_pickle(path)]
    if found:
        yield Finding(
            "weights-pickle",
            "note",
            "weights are stored as pickles",
            (("files", some([path.name for path in found])),),
            "A pickle may hold code; Pellucid opens it with torch's restricted reader, other programs may run it.",
            "Save the model as safetensors.",
        )


def _is_pickle(path: Path) -> bool:
    try:
        return path.suffix in weights.PICKLES and weights.kind_of(path) != "safetensors"
    except PellucidError:
        return False


@check("numbers of weights")
def numbers(subject: Subject) -> Iterator[Finding]:
    """NaN and infinities in the files, and a last layer that is all zeros."""
    if subject.quick:
        raise UnsupportedCheck(QUICK)
    for part, held in _stored(subject):
        broken = [name for name, tensor in held.items() if not _is_finite(tensor)]
        if broken:
            tensor = held[broken[0]]
            count = int((~torch.isfinite(tensor.float())).sum())
            yield Finding(
                "weights-not-finite",
                "error",
                f"{len(broken)} weights of {part} hold NaN or infinity",
                (("weights", len(broken)), ("first", broken[0]), ("non-finite values in it", count),
                 ("dtype", dtype_name(tensor.dtype))),
                "Whatever passes through them is NaN: the training diverged, or a conversion to half precision "
                "overflowed.",
                "Use an earlier checkpoint, or convert again from float32.",
            )  # fmt: skip
        outputs = _OUTPUTS if part in NETWORK_PARTS else (f"{single_file.UNET}out.2.weight",)
        output = next((name for name in outputs if name in held), None)
        if output is not None and not bool(held[output].any()):
            yield Finding(
                "weights-zero",
                "warning",
                f"the last layer of {part} is all zeros",
                (("weight", output), ("largest", 0.0)),
                "Networks start like this before training: its output is always zero.",
                "Use the trained weights; this looks like a checkpoint of the very first step.",
            )


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor.float() if tensor.element_size() < _SMALL else tensor).all())
