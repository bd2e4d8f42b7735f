"""Out of memory: what cannot fit is refused before it runs; who owns the peak of a stage, and what to turn on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pellucid.core.errors import PellucidError
from pellucid.pipeline.memory import in_words, networks_by_name, predict
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.request import Request
from pellucid.pipeline.tracker import METER

if TYPE_CHECKING:
    from pellucid.pipeline.pipeline import Pipeline

HELPS = 0.95  # advice must bring the peak below this share of what it was
TILE = 64
CHANGES: dict[str, tuple[dict[str, Any], ...]] = {
    "text": ({"offload": "component"},),
    "encode": ({"offload": "component"}, {"vae_tile": TILE}),
    "denoise": ({"offload": "component"}, {"offload": "block"}, {"attention": "auto"}),
    "decode": ({"offload": "component"}, {"vae_slicing": True}, {"vae_tile": TILE}, {"attention": "auto"}),
}


ROUGH = 8 * 2**10  # bytes a pixel that a run with a VAE stays below: measured are 0.6 (scenes-128) to 5 kB (SDXL)
OF_PIXELS = 8  # times that, of a network of pixels
LITTLE = 2**31  # bytes, by the rough count, that nothing is asked about
GROUPS = Path("/sys/fs/cgroup")


def check_fits(pipe: Pipeline, request: Request, size: tuple[int, int], count: int) -> None:
    """Refuses a request whose predicted peak is beyond the memory that is free.

    A rehearsal takes half a second, so it is made only of what does not fit by a rough count, and not twice."""
    pixels = size[0] * size[1] * count
    rough = ROUGH * pixels * (OF_PIXELS if pipe.components.vae is None else 1)
    if rough < LITTLE or pixels <= pipe._fitted or METER.get() is not None:
        return
    room = available(pipe.device)
    if room is None:
        return
    if rough > room:
        try:
            forecast = predict(pipe, request, steps=1)
        except Exception:  # what is wrong with the request is said when it runs
            return
        need = forecast.peak.total - resident(pipe)
        if need > room:
            told = f"{in_words(need)} more are predicted to be needed, {in_words(room)} are free"
            advice = explain(pipe, request, forecast.stage)
            raise PellucidError(f"memory must suffice for stage {forecast.stage}; {told}. {advice}", "out-of-memory")
    pipe._fitted = pixels


def resident(pipe: Pipeline) -> int:
    """Bytes of the model's networks that are on the device already."""
    networks = networks_by_name(pipe.components).values()
    held = {id(t): t for network in networks for t in (*network.parameters(), *network.buffers())}
    return sum(t.nbytes for t in held.values() if t.device.type == pipe.device.type)


def available(device: torch.device) -> int | None:
    """Bytes that a run may still take on a device; None where that is not known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    found = list(limits(words_of(Path("/proc/self/cgroup"))))
    free = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in words_of(Path("/proc/meminfo")).splitlines()}
    if "MemAvailable" in free:
        found.append(free["MemAvailable"] + free.get("SwapFree", 0))
    if (taken := words_of(Path("/proc/self/statm"))) and (most := address_space()) is not None:
        found.append(most - int(taken.split()[0]) * os.sysconf("SC_PAGE_SIZE"))
    return max(min(found), 0) if found else None


def address_space() -> int | None:
    """The limit of this process (`ulimit -v`), where it has one."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if most == resource.RLIM_INFINITY else most


def limits(groups: str) -> Iterator[int]:
    """What the control groups of this process, as /proc/self/cgroup names them, leave: cached files can be let go."""
    for line in groups.splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root = GROUPS / "memory" if kinds else GROUPS
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents) if inner.is_relative_to(root) else ():
            most, used = (words_of(folder / name).strip() for name in names)
            if most.isdecimal() and used.isdecimal():
                stat = dict(row.split() for row in words_of(folder / "memory.stat").splitlines())
                cached = sum(int(stat.get(name, 0)) for name in ("inactive_file", "active_file"))
                yield int(most) - int(used) + cached
            if folder == root:
                break


def words_of(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError):
        return ""


def explain(pipe: Pipeline, request: Request, stage: str) -> str:
    """Who owns the peak of a stage, and what would lower it by how much. All of it is predicted, nothing is run."""
    many = len(request.seeds()) > 1
    changes = {words(change): policy for change, policy in possible(pipe, stage, many)}
    try:
        now = predict(pipe, request, steps=1).stages[stage]
        found = cures(pipe, request, stage, changes)
    except Exception:  # advice must not hide what it is about
        fewer = ["fewer images at once"] if many else []
        return f"Use {', '.join(['a smaller size', *fewer, *changes])}."
    better = sorted((total, name) for name, total in found.items() if total < HELPS * now.total)
    advice = "; ".join(f"{name} brings it to {in_words(total)}" for total, name in better)
    owner, whole, held = now.owner or "The stage itself", in_words(now.total), in_words(now.weights)
    other = "Use a smaller size, or a device with more memory"
    return f"{owner} owns its peak: {whole} predicted, {held} of it weights. {advice or other}."


def words(change: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in change.items())


def possible(pipe: Pipeline, stage: str, many: bool) -> Iterator[tuple[dict[str, Any], Policy]]:
    """The changes of policy that act on a stage, on this device, with the rest of the policy."""
    for change in CHANGES.get(stage, ()):
        with suppress(PellucidError):
            policy = replace(pipe.policy, **change)
            policy.check(pipe.device)
            if policy != pipe.policy and (many or "vae_slicing" not in change):
                yield change, policy


def cures(pipe: Pipeline, request: Request, stage: str, changes: Mapping[str, Policy]) -> dict[str, int]:
    """What might help, and the stage's peak with it: changes of the policy, half precision, one image at a time."""

    def peak(of: Request = request, **goal: Any) -> int:
        return predict(pipe, of, steps=1, **goal).stages[stage].total

    found = {name: peak(policy=policy) for name, policy in changes.items()}
    if next(pipe.components.network.parameters()).dtype == torch.float32:
        found["dtype='bfloat16'"] = peak(dtype=torch.bfloat16)
    if len(request.seeds()) > 1:
        found["one image at a time"] = peak(alone(request))
    return found


def alone(request: Request) -> Request:
    """The same request for its first image."""
    label = request.label
    many = isinstance(label, list | tuple)
    return replace(
        request,
        n=1,
        seed=0,
        latents=None,
        prompt=request.prompts[0] if request.prompt is not None else None,
        negative_prompt=request.negatives[0] if request.negative_prompt is not None else None,
        **{name: texts[0] for name, texts in request.seconds.items()},  # type: ignore[arg-type]
        label=label[0] if many else label,  # type: ignore[index]
    )
