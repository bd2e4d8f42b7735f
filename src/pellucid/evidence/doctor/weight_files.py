"""Checks of the weights as they lie on disk: names, shapes, dtypes, and numbers that are none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError
from pellucid.evidence.doctor.checks import Finding, Unable, check
from pellucid.evidence.doctor.components import Component, inventory, sketch
from pellucid.evidence.doctor.subject import NEEDS, Subject
from pellucid.interop import single_file, weights
from pellucid.interop.components import KINDS, NETWORK_PARTS
from pellucid.interop.folder import IGNORED
from pellucid.interop.weights import NOT_WEIGHTS, some

USUAL = (torch.float32, torch.float16, torch.bfloat16)
SMALL = 2  # bytes: what is kept in fewer is compressed, and has to be opened in a dtype that is named
OUTPUTS = ("conv_out.weight", "proj_out_2.weight", "proj_out.weight")  # of UNets, DiT, PixArt
# Refusals of folders that other findings explain, and refusals that are no fault of the model's.
SAID = (
    "class", "component-missing", "components-fit", "config-class", "config-groups", "config-key", "config-length",
    "config-missing", "config-unsupported", "config-value", "json-file", "tokenizer-files", "unknown-target",
    "weights-corrupt", "weights-file", "weights-index", "weights-keys", "weights-lfs", "weights-missing",
    "weights-pickle", "weights-shape", "weights-shard", "dtype",
)  # fmt: skip
FAULTLESS = {
    "pipeline-class": "Open it with diffusers and give the pipeline to pellucid.wrap.",
    "tokenizer-missing": "--tokenizer FOLDER",
}


@check("loading", needs=())
def loading(subject: Subject) -> Iterator[Finding]:
    """A model that does not load for a reason that no other check names."""
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
    elif error.code in FAULTLESS:
        yield Finding(
            "not-supported",
            "note",
            "Pellucid does not open this model as it is",
            (("error", error.code),),
            str(error),
            FAULTLESS[error.code],
        )
    elif subject.folder is None or error.code not in SAID:
        yield Finding(
            "does-not-load",
            "error",
            "the model does not load",
            (("error", error.code),),
            str(error),
            "Do what the cause says; `pellucid inspect MODEL` shows what is there.",
        )


@check("configs of the components", needs=("folder",))
def configs(subject: Subject) -> Iterator[Finding]:
    """Keys and values that the component's class does not take."""
    for part, listed in networks(subject):
        try:
            sketch(listed)
        except PellucidError as error:
            unknown = error.code == "config-key"
            yield Finding(
                "model-config-key" if unknown else "model-config-value",
                "error",
                f"the config of {part} {'has a key that nobody reads' if unknown else 'describes no network'}",
                (("part", part), ("class", listed.kind), ("error", error.code)),
                str(error),
                f"Correct or remove it in {part}/config.json.",
            )


def networks(subject: Subject) -> list[tuple[str, Component]]:
    """The components that are networks of ours and whose configs can be read."""
    found = inventory(subject).items()
    return [
        (p, one) for p, one in found if one.config is not None and one.network_kind is not None and p not in IGNORED
    ]


@check("names and shapes of weights", needs=("folder",))
def names(subject: Subject) -> Iterator[Finding]:
    """What the config asks for and what the files hold."""
    for part, listed in networks(subject):
        try:
            wanted = sketch(listed).state_dict()
        except PellucidError:
            continue  # said by the check of configs
        try:
            held = tensors_of(listed)
        except PellucidError as error:
            yield unreadable(part, error)
            continue
        missing, extra = sorted(set(wanted) - set(held)), sorted(set(held) - set(wanted))
        if missing:
            yield absent(part, missing, len(wanted), listed)
        if extra:
            yield surplus(part, extra, held)
        wrong = [key for key, tensor in held.items() if key in wanted and tensor.shape != wanted[key].shape]
        if wrong:
            yield misshapen(part, wrong, held, wanted)


def tensors_of(listed: Component) -> dict[str, Tensor]:
    """The weights of a component under today's names; they stay on disk until they are looked at."""
    kind = listed.network_kind
    assert kind is not None
    found, _ = weights.read_folder(listed.place)
    return {name: t for name, t in KINDS[kind].rename(found).items() if not NOT_WEIGHTS.search(name)}


def unreadable(part: str, error: PellucidError) -> Finding:
    return Finding(
        "weights-file", "error", f"the weights of {part} cannot be read", (("part", part), ("error", error.code)),
        str(error), "Download the file again.",
    )  # fmt: skip


def absent(part: str, missing: list[str], count: int, listed: Component) -> Finding:
    return Finding(
        "weights-missing",
        "error",
        f"{len(missing)} of {count} weights of {part} are missing",
        (("missing", len(missing)), ("of", count), ("such as", some(missing))),
        f"The config of {part} ({listed.kind}) asks for them and the file does not hold them: diffusers would draw "
        "them at random.",
        "Take the config that was saved with these weights, or the whole file.",
    )


def surplus(part: str, extra: list[str], held: Mapping[str, Tensor]) -> Finding:
    size = sum(held[name].numel() for name in extra)
    return Finding(
        "weights-extra",
        "error",
        f"{len(extra)} tensors in the file of {part} belong to no weight",
        (("extra", len(extra)), ("numbers in them", size), ("such as", some(extra))),
        f"The config of {part} has no place for them, so what they learned has no effect, and Pellucid refuses them.",
        "Take the config that was saved with these weights, or remove the tensors.",
    )


def misshapen(part: str, wrong: list[str], held: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Finding:
    key = wrong[0]
    return Finding(
        "weights-shape",
        "error",
        f"{len(wrong)} weights of {part} have another shape than its config says",
        (("weight", key), ("in the file", str(tuple(held[key].shape))),
         ("by the config", str(tuple(wanted[key].shape)))),
        f"Config and weights of {part} are of different models, or a key of the config was changed.",
        "Take the config that was saved with these weights.",
    )  # fmt: skip


# --- numbers ---------------------------------------------------------------------------------------------------


def stored(subject: Subject) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Every component's tensors, or those of a single file."""
    if subject.file is not None:
        try:
            yield subject.file.name, weights.read(subject.file)
        except PellucidError:
            return
    elif subject.folder is not None:
        for part, listed in networks(subject):
            try:
                yield part, tensors_of(listed)
            except PellucidError:
                continue
    else:
        raise Unable(NEEDS["pipeline"])


@check("dtypes of weights", needs=())
def dtypes(subject: Subject) -> Iterator[Finding]:
    """Dtypes that few models have, and pickles."""
    for part, held in stored(subject):
        kinds = {tensor.dtype for tensor in held.values() if not bookkeeping(subject, tensor)}
        odd = sorted(str(kind).removeprefix("torch.") for kind in kinds if kind not in USUAL)
        floats = sorted(str(kind).removeprefix("torch.") for kind in kinds if kind.is_floating_point)
        if odd:
            yield odd_dtype(part, odd, kinds)
        elif len(floats) > 1:
            yield Finding(
                "weights-mixed",
                "note",
                f"the weights of {part} are of several dtypes",
                (("dtypes", ", ".join(floats)),),
                "They are opened in the widest of them, which takes more memory than the file.",
                f"--dtype {floats[0]}, or save them in one dtype",
            )
    yield from pickles(subject)


def bookkeeping(subject: Subject, tensor: Tensor) -> bool:
    """Counters and tables of whole numbers in single files."""
    return subject.file is not None and not tensor.is_floating_point()


def odd_dtype(part: str, odd: list[str], kinds: Iterable[torch.dtype]) -> Finding:
    small = any(kind.itemsize < SMALL or not kind.is_floating_point for kind in kinds if kind not in USUAL)
    cause = (
        "Weights of 8 bits and whole numbers are compressed: they mean something only to who compressed them."
        if small
        else "float64 doubles the memory of float32 and makes no better image."
    )
    return Finding(
        "weights-dtype",
        "warning" if small else "note",
        f"the weights of {part} are stored as {', '.join(odd)}",
        (("dtypes", ", ".join(odd)),),
        cause,
        "--dtype float16, or the weights as they were trained" if small else "Save them as float32 or float16.",
    )


def pickles(subject: Subject) -> Iterator[Finding]:
    found = []
    if subject.file is not None:
        found = [subject.file] if is_pickle(subject.file) else []
    elif subject.folder is not None:
        for _, listed in networks(subject):
            try:
                path = weights.find(listed.place).path
            except PellucidError:
                continue
            found += [path] if is_pickle(path) else []
    if found:
        yield Finding(
            "weights-pickle",
            "note",
            "weights are kept as pickles",
            (("files", some([path.name for path in found])),),
            "A pickle may hold code; Pellucid opens it with torch's restricted reader, other programs may run it.",
            "Save the model as safetensors.",
        )


def is_pickle(path: Path) -> bool:
    try:
        return path.suffix in weights.PICKLES and weights.kind_of(path) != "safetensors"
    except PellucidError:
        return False


@check("numbers of weights", needs=())
def numbers(subject: Subject) -> Iterator[Finding]:
    """NaN and infinities in the files, and a last layer that says nothing."""
    if subject.quick:
        raise Unable("weights were not asked for (--quick)")
    for part, held in stored(subject):
        broken = [name for name, tensor in held.items() if not is_finite(tensor)]
        if broken:
            tensor = held[broken[0]]
            count = int((~torch.isfinite(tensor.float())).sum())
            yield Finding(
                "weights-not-finite",
                "error",
                f"{len(broken)} weights of {part} hold NaN or infinity",
                (("weights", len(broken)), ("first", broken[0]), ("numbers that are none in it", count),
                 ("dtype", str(tensor.dtype).removeprefix("torch."))),
                "Whatever passes through them is NaN: the training diverged, or a conversion to half precision "
                "overflowed.",
                "Take an earlier checkpoint, or convert again from float32.",
            )  # fmt: skip
        output = silent_output(part, held)
        if output is not None:
            yield Finding(
                "weights-zero",
                "warning",
                f"the last layer of {part} is all zeros",
                (("weight", output), ("largest", 0.0)),
                "Networks begin so before training: this one says nothing, whatever it is shown.",
                "Take the trained weights; a checkpoint of the very first step was saved.",
            )


def is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor.float() if tensor.element_size() < SMALL else tensor).all())


def silent_output(part: str, held: Mapping[str, Tensor]) -> str | None:
    """The name of a denoising network's last weight where it is zero throughout."""
    last = f"{single_file.UNET}out.2.weight"
    names = OUTPUTS if part in NETWORK_PARTS else (last,)
    name = next((name for name in names if name in held), None)
    return name if name is not None and not bool(held[name].any()) else None
