"""The guided denoiser: a network, what it is told with and without the prompt, and guidance → x0 at a level.

cond and uncond are one batched call. Where no image of the batch is guided, uncond is not asked for. The rules act in
one order, whatever the order in which they were given: combine cond and uncond; add what leads away from worse
predictions; rescale; bound the range; zero the first steps. Each leaves its prediction among the parts of the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pellucid.core import target as targets
from pellucid.core.batch import Batched, Prediction
from pellucid.core.denoiser import input_scale, read_output, sigma_data_of, split
from pellucid.core.errors import PellucidError, rule
from pellucid.core.filters import Filter
from pellucid.core.plan import Plan
from pellucid.core.schedule import Level, Schedule, Target
from pellucid.core.table import column
from pellucid.models import inputs as trees
from pellucid.models.guidance import Dose, Guidance, PlanGuidance
from pellucid.models.inputs import Inputs
from pellucid.models.rules import AutoGuidance, CFGZero, Extra, Space, along

Network = Callable[..., Tensor]
_OFF = Guidance(1.0)


class Terms(Mapping[str, Tensor]):
    """The named predictions of one call, in the order in which they were made; reading one gives its x0.

    A prediction is kept in the space where it was made and converted when somebody asks, once. Read them while the
    step is shown: a compiled network may write its next output into the same memory.
    """

    def __init__(self, x: Tensor, levels: Sequence[Level], schedule: Schedule, target: Target) -> None:
        self.x, self.levels, self.schedule, self.target = x, levels, schedule, target
        self.scales: tuple[float, ...] = ()  # of this call: one for all images, or one per image
        self.known: dict[str, dict[Space, Tensor]] = {}

    def put(self, name: str, space: Space, value: Tensor) -> str:
        self.known[name] = {space: value}
        return name

    def within(self, name: str, space: Space) -> Tensor:
        forms = self.known[name]
        if space not in forms:
            source, value = next(iter(forms.items()))
            forms[space] = self.convert(value, [self.numbers(source, space, level) for level in self.levels])
        return forms[space]

    def reading(self, name: str) -> tuple[Tensor, list[tuple[float, float]]]:
        """A prediction as it was made, and (k_x, k) of each level with x0 = k_x·x + k·prediction."""
        source, value = next(iter(self.known[name].items()))
        return value, [self.numbers(source, "x0", level) for level in self.levels]

    def numbers(self, source: Space, to: Space, level: Level) -> tuple[float, float]:
        """(k_x, k) with `to` = k_x·x + k·value."""
        if source == "raw":
            return read_output(self.schedule, self.target, to, level)  # type: ignore[arg-type]
        if to == "raw":
            k_x, k_out = read_output(self.schedule, self.target, source, level)
            if k_out == 0.0:
                targets.from_eps(self.target, level, sigma_data_of(self.schedule))  # raises: alpha is 0
            return -k_x / k_out, 1.0 / k_out
        return targets.convert(source, to, level, sigma_data_of(self.schedule))

    def convert(self, value: Tensor, pairs: Sequence[tuple[float, float]]) -> Tensor:
        if all(pair == (0.0, 1.0) for pair in pairs):
            return value
        one = len(pairs) == 1
        factor: Any = column([k for _, k in pairs], self.x, one)
        if all(k_x == 0.0 for k_x, _ in pairs):
            return torch.mul(value, factor)
        return torch.mul(self.x, column([k_x for k_x, _ in pairs], self.x, one)).add_(value * factor)

    def __getitem__(self, name: str) -> Tensor:
        return self.within(name, "x0")

    def __contains__(self, name: object) -> bool:
        return name in self.known  # not by reading it, which would convert

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)


@dataclass(frozen=True, eq=False)
class GuidedDenoiser:
    """network(x, time, **inputs) → out, as a guided x0 denoiser for `run`; `guidance` may be one per image.

    `uncond` are the inputs of the empty or negative prompt, `weak` the second network of autoguidance. Channels of
    the output beyond those of x are a learned variance, and are dropped. `dtype` is what the network works in.
    `keep_raw` hands the x0 from before the filter to plans that take eps from it (diffusers' DDIM), where CFG++ plans
    have the unconditional one.
    """

    network: Network
    schedule: Schedule
    target: Target
    cond: Inputs
    uncond: Inputs | None = None
    guidance: Guidance | Sequence[Guidance] = _OFF
    weak: Network | None = None
    x0_filter: Filter | None = None
    dtype: torch.dtype | None = None
    keep_raw: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", targets.named(self.target))
        first, *others = self.guidances
        if any(other.acts != first.acts for other in others):
            raise PellucidError(
                "guidance of one batch must have the same rules for every image, apart from scale and interval; "
                "got several. Run them as several batches.",
                "guidance-mixed",
            )
        if self.uncond is None and any(g.needs_uncond for g in self.guidances):
            wanted = f"given for guidance {first.text()}"
            raise PellucidError(rule("uncond", wanted, None, "Give an empty prompt's inputs, or scale 1."), "guidance")
        self.check_extras(first.extras)

    @property
    def guidances(self) -> Sequence[Guidance]:
        return (self.guidance,) if isinstance(self.guidance, Guidance) else self.guidance

    def check_extras(self, extras: Sequence[Extra]) -> None:
        asks_weak = any(isinstance(extra, AutoGuidance) for extra in extras)
        if asks_weak != (self.weak is not None):
            must = "a second network for autoguidance" if asks_weak else "None without the rule autoguidance"
            raise PellucidError(rule("weak", must, type(self.weak).__name__ if self.weak else None), "guidance")
        for extra in extras:
            if not isinstance(extra, AutoGuidance) and not _takes(self.network, extra.term):
                kind = type(self.network).__name__
                raise PellucidError(
                    rule("network", f"one that takes `{extra.term}` for {extra.name}", kind), "guidance"
                )

    def bind(self, plans: Sequence[Plan | None]) -> GuidedRun:
        """A fresh run, one plan an image. The loop calls this; a run shares nothing with another."""
        guidances, count = self.guidances, len(plans)
        if len(guidances) not in (1, count):
            raise PellucidError(rule("guidance", f"one, or one for each of {count} images", len(guidances)), "guidance")
        for given in (self.cond, self.uncond):
            if given is not None:
                trees.check(given, count)
        made: dict[tuple[int, int], PlanGuidance] = {}
        bounds = []
        for i, plan in enumerate(plans):
            own = guidances[i % len(guidances)]
            key = (id(own), id(plan))
            made[key] = made.get(key) or own.bind(plan, self.schedule)
            bounds.append(made[key])
        apart = [plan is not None and plan.guided and not self.keep_raw for plan in plans]
        return GuidedRun(self, guidances[0], bounds, apart, self.cond, self.uncond)

    def __call__(self, x: Tensor, level: Any, time: Any) -> Prediction:
        """One call outside of a run: only for guidance that does not ask where a run stands."""
        for own in self.guidances:
            if own.needs_plan:
                raise PellucidError(
                    f"guidance {own.text()} must be bound to a plan; got a call without one. "
                    "Use run, or denoiser.bind([plan, …]) with one plan an image.",
                    "guidance-unbound",
                )
        return self.bind([None] * len(x))(x, level, time)


def _takes(network: Network, name: str) -> bool:
    """Whether a network has a keyword input of this name."""
    try:
        known = inspect.signature(getattr(network, "forward", network)).parameters
    except (TypeError, ValueError):
        return True
    return name in known or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())


@dataclass
class GuidedRun:
    """One run of a guided denoiser: its doses, its inputs, and what its rules remember."""

    owner: GuidedDenoiser
    guidance: Guidance  # the rules, which all images share
    bounds: list[PlanGuidance]  # one per image
    apart: list[bool]  # whose sampler keeps uncond apart (CFG++)
    cond: Inputs
    uncond: Inputs | None
    both: Inputs | None = None
    past: Tensor | None = None

    def select(self, images: Sequence[int]) -> GuidedRun:
        if len(images) == len(self.bounds):
            return self
        return replace(
            self,
            bounds=[self.bounds[i] for i in images],
            apart=[self.apart[i] for i in images],
            cond=trees.pick(self.cond, images),
            uncond=None if self.uncond is None else trees.pick(self.uncond, images),
            both=None,
            past=None if self.past is None else self.past[list(images)],
        )

    def __call__(self, x: Tensor, level: Any, time: Any) -> Prediction:
        if len(x) != len(self.bounds):
            raise PellucidError(rule("x", f"a batch of {len(self.bounds)} images, as bound", len(x)), "shape")
        levels = split(level) if isinstance(level, Batched) else [level]
        doses = self.doses(levels)
        owner = self.owner
        terms = Terms(x, levels, owner.schedule, owner.target)
        terms.scales = tuple(dose.scale for dose in doses)
        name = ""
        if not all(dose.zero for dose in doses):
            self.predict(terms, time, doses)
            name = self.correct(terms, self.add(terms, self.combine(terms, doses), doses), doses)
        if any(dose.zero for dose in doses):
            name = self.zero(terms, name, doses)
        x0 = self.settle(terms, name, doses)
        x0 = x0 if owner.x0_filter is None else owner.x0_filter(x0)
        return Prediction(x0, terms[name] if owner.keep_raw else self.uncond_apart(terms, x0, doses), terms)

    def doses(self, levels: Sequence[Level]) -> list[Dose]:
        """One for all images where they agree, or one per image."""
        first = self.bounds[0]
        if len(levels) == 1 and all(bound is first for bound in self.bounds):
            return [first.at(levels[0])]
        found = [bound.at(levels[i % len(levels)]) for i, bound in enumerate(self.bounds)]
        return found[:1] if all(dose == found[0] for dose in found) else found

    def asks_uncond(self, doses: Sequence[Dose]) -> bool:
        if any(dose.guided and not dose.zero for dose in doses):
            return True
        return self.uncond is not None and any(self.keeps_apart(doses))

    def keeps_apart(self, doses: Sequence[Dose]) -> list[bool]:
        return [apart and (d := doses[i % len(doses)]).inside and not d.zero for i, apart in enumerate(self.apart)]

    def predict(self, terms: Terms, time: Any, doses: Sequence[Dose]) -> None:
        """Asks the network for every prediction that some image needs at this level."""
        x, owner = terms.x, self.owner
        scales = [input_scale(owner.schedule, level) for level in terms.levels]
        scaled = x if all(s == 1.0 for s in scales) else x * column(scales, x, len(scales) == 1)
        scaled = scaled if owner.dtype is None else scaled.to(owner.dtype)
        told = time.to(x) if isinstance(time, Tensor) else torch.full((len(x),), time, dtype=x.dtype, device=x.device)
        if self.asks_uncond(doses):
            if self.both is None:
                assert self.uncond is not None
                self.both = trees.join(self.uncond, self.cond)
            out = owner.network(torch.cat([scaled, scaled]), torch.cat([told, told]), **self.both)
            uncond, cond = read(out, x, 2).chunk(2)
            terms.put("cond", "raw", cond)
            terms.put("uncond", "raw", uncond)
        else:
            terms.put("cond", "raw", read(owner.network(scaled, told, **self.cond), x))
        for k, extra in enumerate(self.guidance.extras):
            if any(dose.extras[k] for dose in doses):
                network = owner.weak if isinstance(extra, AutoGuidance) else owner.network
                assert network is not None
                terms.put(extra.term, "raw", read(network(scaled, told, **self.cond, **extra.told), x))

    def combine(self, terms: Terms, doses: Sequence[Dose]) -> str:
        """cond and uncond into one; an image whose scale is 1 keeps cond."""
        if not any(dose.guided for dose in doses):
            return "cond"
        way = self.guidance.combination
        cond, uncond = terms.within("cond", way.space), terms.within("uncond", way.space)
        scale = column([dose.scale for dose in doses], terms.x, len(doses) == 1)
        guided, past = way.combine(cond, uncond, scale, self.past)
        on = _mask([dose.guided for dose in doses], terms.x)
        if on is not None:
            guided = torch.where(on, guided, cond)
            if past is not None:
                past = torch.where(on, past, 0.0 if self.past is None else self.past)
        self.past = past
        return terms.put(way.name, way.space, guided)

    def add(self, terms: Terms, name: str, doses: Sequence[Dose]) -> str:
        """Away from each worse prediction; in the space of the combination, since it is the same in all."""
        space = self.guidance.combination.space
        for k, extra in enumerate(self.guidance.extras):
            if extra.term in terms:
                away = terms.within("cond", space) - terms.within(extra.term, space)
                weight = column([dose.extras[k] for dose in doses], terms.x, len(doses) == 1)
                name = terms.put(extra.name, space, along(terms.within(name, space), away, weight))
        return name

    def correct(self, terms: Terms, name: str, doses: Sequence[Dose]) -> str:
        """Rescale, then the range. An image that nothing has changed is left as it is."""
        for way in self.guidance.corrections:
            wanted = [dose.guided if way.compares else dose.changed for dose in doses]
            if not any(wanted):
                continue
            guided, cond = terms.within(name, way.space), terms.within("cond", way.space)
            uncond = terms.within("uncond", way.space) if way.compares else None
            better = way.correct(guided, cond, uncond)
            on = _mask(wanted, terms.x)
            name = terms.put(way.name, way.space, better if on is None else torch.where(on, better, guided))
        return name

    def zero(self, terms: Terms, name: str, doses: Sequence[Dose]) -> str:
        """CFG-Zero*: the first steps predict nothing, in the space of the rule."""
        way = self.guidance.combination
        assert isinstance(way, CFGZero)
        on = _mask([dose.zero for dose in doses], terms.x)
        empty = torch.zeros_like(terms.x) if on is None else terms.within(name, way.space).masked_fill(on, 0.0)
        return terms.put("zero_init", way.space, empty)

    def settle(self, terms: Terms, name: str, doses: Sequence[Dose]) -> Tensor:
        """The x0 of the last rule; that of cond, bit by bit, for an image that nothing changed in a batch of others."""
        on = _mask([dose.changed or dose.zero for dose in doses], terms.x) if len(doses) > 1 else None
        return terms[name] if on is None else torch.where(on, terms[name], terms["cond"])

    def uncond_apart(self, terms: Terms, x0: Tensor, doses: Sequence[Dose]) -> Tensor | None:
        """The unconditional x0 for the samplers that use it; an image that is not guided has x0 in its place."""
        wanted = self.keeps_apart(doses)
        if "uncond" not in terms or not any(wanted):
            return None
        on = _mask(wanted, x0)
        return terms["uncond"] if on is None else torch.where(on, terms["uncond"], x0)


def _mask(wanted: Sequence[bool], like: Tensor) -> Tensor | None:
    """One truth an image, shaped to broadcast; None where all are true."""
    if all(wanted):
        return None
    return torch.tensor(list(wanted), device=like.device).reshape(-1, *([1] * (like.ndim - 1)))


def read(out: Tensor, x: Tensor, times: int = 1) -> Tensor:
    """The output in x's precision, without the channels of a learned variance."""
    wanted = (len(x) * times, *x.shape[1:])
    if x.ndim > 1 and out.ndim == x.ndim and out.shape[1] == 2 * x.shape[1]:
        out = out[:, : x.shape[1]]
    if tuple(out.shape) != wanted:
        raise PellucidError(rule("output of the network", f"of shape {wanted}", tuple(out.shape)), "shape")
    return out.to(x.dtype)
