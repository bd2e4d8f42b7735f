"""The proxies that a wrapped pipeline works with, in the place of its scheduler and of its network."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule

# Tensors that all images share, though their first side may happen to be as long as the batch.
_SHARED = re.compile(r"^(txt|img)_ids$|rotary|freqs")


@dataclass(frozen=True)
class Times:
    """What a pipeline asks of its scheduler before its loop, such as mu, the shift for the image's size."""

    steps: int | None = None
    timesteps: tuple[float, ...] | None = None
    sigmas: tuple[float, ...] | None = None
    mu: float | None = None
    original: int | None = None

    @property
    def count(self) -> int | None:
        given = self.sigmas if self.sigmas is not None else self.timesteps
        return self.steps if given is None else len(given)


@dataclass
class Call:
    """One call of the network: its inputs, and its answer with the batch first."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Tensor


@dataclass
class Reply:
    """One step of a pipeline: its prediction, after its own guidance, and the calls that led to it."""

    mixed: Tensor
    calls: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class Branch:
    """One of two predictions that a pipeline makes: a half of one call's batch, or one of two calls."""

    index: int
    calls: int
    images: int

    def half(self, call: Call | tuple[Any, dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The network's inputs for this half alone."""
        args, kwargs = (call.args, call.kwargs) if isinstance(call, Call) else call
        if self.calls > 1:
            return args, kwargs
        keep = slice(self.index * self.images, (self.index + 1) * self.images)
        cut = [_part(value, keep, 2 * self.images) for value in args]
        return tuple(cut), {name: _part(value, keep, 2 * self.images, name) for name, value in kwargs.items()}


def _part(tree: Any, keep: slice, count: int, name: str = "") -> Any:
    """The rows `keep` of everything that has `count` rows."""
    if _SHARED.search(name):
        return tree
    if isinstance(tree, Tensor):
        return tree[keep] if tree.ndim and len(tree) == count else tree
    if isinstance(tree, Mapping):
        return {key: _part(value, keep, count, str(key)) for key, value in tree.items()}
    if isinstance(tree, list) and len(tree) == count:
        return tree[keep]
    return [_part(value, keep, count) for value in tree] if isinstance(tree, list) else tree


def tensor_of(answer: Any) -> Tensor:
    """The prediction in a network's answer: a tensor, a list of one per image, a tuple's first, or `.sample`."""
    if isinstance(answer, tuple):
        answer = answer[0]
    elif not isinstance(answer, Tensor | list):
        answer = answer.sample
    return torch.stack(list(answer)) if isinstance(answer, list) else answer


def doubled(answer: Any) -> Any:
    """An answer for one half of the batch in the form of an answer for both."""
    if isinstance(answer, tuple):
        return (doubled(answer[0]), *answer[1:])
    if isinstance(answer, Tensor):
        return torch.cat([answer, answer])
    if isinstance(answer, list):
        return [*answer, *answer]
    made = copy.copy(answer)
    made.sample = doubled(answer.sample)
    return made


class Talker(Protocol):
    """What the two proxies need of the conversation that they take part in (wrap.py)."""

    only: Branch | None
    calls: list[Call]
    answer: Any
    lay: Callable[[Times], Tensor]

    def step(self, output: Tensor, sample: Tensor) -> Tensor: ...
    def times_are_laid(self) -> None: ...


class NetworkProxy:
    """Stands for the network: calls it, and keeps its inputs and its answers."""

    def __init__(self, talk: Talker, real: Any) -> None:
        vars(self).update(talk=talk, real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["real"], name)

    __class__ = property(lambda self: type(vars(self)["real"]))  # pipelines ask isinstance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        talk, real = vars(self)["talk"], vars(self)["real"]
        only, calls = talk.only, talk.calls
        batched = only is not None and only.calls == 1
        if batched:
            args, kwargs = only.half((args, kwargs))
        if only is None or batched or len(calls) == only.index or talk.answer is None:
            talk.answer = real(*args, **kwargs)
        # else: a call that is not needed gets the last answer; the pipeline's mixture is not used then
        calls.append(Call(args, kwargs, tensor_of(talk.answer)))
        return doubled(talk.answer) if batched else talk.answer


class SchedulerProxy:
    """Stands for the scheduler: the times are those of our plan, and each step is handed over."""

    order = 1
    init_noise_sigma = 1.0  # the plan scales x

    def __init__(self, talk: Talker, real: Any) -> None:
        self.talk = talk
        self.real = copy.copy(real)  # a pipeline may set something on it
        self.timesteps = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        if name == "real":
            raise AttributeError(name)
        return getattr(self.real, name)

    __class__ = property(lambda self: type(self.real))  # pipelines ask isinstance

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        timesteps: Any = None,
        sigmas: Any = None,
        mu: float | None = None,
        original_inference_steps: int | None = None,
        **others: Any,
    ) -> None:
        unknown = sorted(name for name, value in others.items() if value is not None)
        if unknown:
            raise PellucidError(rule("set_timesteps", "given steps, timesteps, sigmas and mu", unknown), "wrap-loop")
        shift = None if mu is None else float(mu)
        times = Times(num_inference_steps, _numbers(timesteps), _numbers(sigmas), shift, original_inference_steps)
        self.timesteps = self.talk.lay(times).to(device)
        self.num_inference_steps = times.count
        self.talk.times_are_laid()

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Text to image begins at the beginning."""

    def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
        return sample  # a wrapped pipeline holds x as its network is to see it

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, return_dict: bool = True, **_: Any) -> Any:
        x = self.talk.step(model_output, sample).to(sample)
        return _SchedulerOutput(x) if return_dict else (x, x)  # the second is what LCM's pipelines decode


def _numbers(values: Any) -> tuple[float, ...] | None:
    return None if values is None else tuple(float(v) for v in values)


@dataclass
class _SchedulerOutput:
    """What a scheduler's `step` returns."""

    prev_sample: Tensor

    def __getitem__(self, key: Any) -> Tensor:
        return self.prev_sample
