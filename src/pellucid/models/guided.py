"""The guided denoiser: a network, what is passed to it with and without the prompt, and guidance → x0 at a level.

The calls of all images are one packed batch: an image that is guided at a row makes two, any other one. The rules act
in one order, whatever the order in which they were given: combine cond and uncond; add what leads away from worse
predictions; rescale; bound the range; zero the first steps. Each leaves its prediction among the parts of the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from pellucid.core import target as targets
from pellucid.core.batch import BatchLevel, Prediction
from pellucid.core.denoiser import input_scale, read_output, sigma_data_of, split
from pellucid.core.errors import PellucidError, rule
from pellucid.core.filters import Filter
from pellucid.core.plan import Plan
from pellucid.core.schedule import Level, Schedule, Target
from pellucid.core.table import column
from pellucid.models import inputs as trees
from pellucid.models.guidance import Dose, Guidance, PlanGuidance
from pellucid.models.inputs import Inputs
from pellucid.models.rules import APG, CFG, AutoGuidance, CFGZero, Extra, Space, along

Network = Callable[..., Tensor]
Line = Mapping[str, Tensor]  # numbers of the rows that images are at, by name, shaped to broadcast against x
_OFF = Guidance(1.0)


class Terms(Mapping[str, Tensor]):
    """The named predictions of one call, in the order in which they were made; reading one gives its x0.

    A prediction is kept in the space where it was made and converted when somebody asks, once. Read them while the
    step is shown: a compiled network may write its next output into the same memory.
    """

    def __init__(
        self, x: Tensor, levels: Sequence[Level], schedule: Schedule, target: Target, line: Line | None = None
    ) -> None:
        self.x, self.levels, self.schedule, self.target = x, levels, schedule, target
        self.line = line  # where the numbers are on a device already
        self.scales: tuple[float, ...] = ()  # of this call: one for all images, or one per image
        self.known: dict[str, dict[Space, Tensor]] = {}

    def put(self, name: str, space: Space, value: Tensor) -> str:
        self.known[name] = {space: value}
        return name

    def within(self, name: str, space: Space) -> Tensor:
        forms = self.known[name]
        if space not in forms:
            source, value = next(iter(forms.items()))
            if self.line is not None:
                k_x, k = self.line[f"{source}>{space}.x"], self.line[f"{source}>{space}.k"]
                forms[space] = torch.addcmul(self.x * k_x, value, k)
            else:
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
        if self.uncond is None and (asking := next((g for g in self.guidances if g.needs_uncond), None)):
            wanted = f"given for guidance {asking.text()}"
            raise PellucidError(rule("uncond", wanted, None, "Give an empty prompt's inputs, or scale 1."), "guidance")
        self.check_extras([extra for g in self.guidances for extra in g.extras])

    def calls_as(self, other: GuidedDenoiser) -> bool:
        """Whether another denoiser's images can be in the same calls."""
        mine, its = ((d.network, d.schedule, d.target, d.dtype) for d in (self, other))
        return mine[0] is its[0] and mine[1:] == its[1:]

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
        """A fresh run, one plan per image. The batch calls this; a run shares nothing with another."""
        guidances, count = self.guidances, len(plans)
        if len(guidances) not in (1, count):
            raise PellucidError(rule("guidance", f"one, or one for each of {count} images", len(guidances)), "guidance")
        for given in (self.cond, self.uncond):
            if given is not None:
                trees.check(given, count)
        made: dict[tuple[int, int], PlanGuidance] = {}
        images = []
        for i, plan in enumerate(plans):
            own = guidances[i % len(guidances)]
            key = (id(own), id(plan))
            made[key] = made.get(key) or own.bind(plan, self.schedule)
            apart = plan is not None and plan.guided and not self.keep_raw
            images.append(ImageGuidance(made[key], plan, apart, self.x0_filter, self.keep_raw))
        return GuidedRun(self, images, Calls.of(self.cond, self.uncond, count))

    def __call__(self, x: Tensor, level: Any, time: Any) -> Prediction:
        """One call outside of a run: only for guidance that does not ask where a run stands."""
        for own in self.guidances:
            if own.needs_plan:
                raise PellucidError(
                    f"guidance {own.text()} must be bound to a plan; got a call without one. "
                    "Use run, or denoiser.bind([plan, …]) with one plan per image.",
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


@dataclass(frozen=True)
class ImageGuidance:
    """What one image of a run wants of its prediction."""

    bound: PlanGuidance
    plan: Plan | None
    apart: bool  # its sampler keeps uncond apart (CFG++)
    x0_filter: Filter | None
    keep_raw: bool

    def apart_at(self, dose: Dose) -> bool:
        """Whether its sampler gets the unconditional prediction at a row with this dose."""
        return self.apart and dose.inside and not dose.zero

    @property
    def rules(self) -> tuple[Any, ...]:
        """What images must share to be corrected together."""
        return self.bound.guidance.acts, self.x0_filter, self.keep_raw


@dataclass(frozen=True)
class Calls:
    """The inputs of all calls that a run can make: `sources` has a row for each, of which every step takes some."""

    sources: Inputs
    cond: tuple[int, ...]  # the row of each image with its prompt
    uncond: tuple[int | None, ...]  # and without it
    taken: dict[tuple[int, ...], tuple[Inputs, Inputs]] = field(default_factory=dict)  # of the last step, and from what

    @staticmethod
    def of(cond: Inputs, uncond: Inputs | None, count: int) -> Calls:
        """Of `count` images; the rows without a prompt come first, as they do in a call."""
        if uncond is None:
            return Calls(cond, tuple(range(count)), (None,) * count)
        return Calls(trees.join(uncond, cond), tuple(range(count, 2 * count)), tuple(range(count)))

    @cached_property
    def device(self) -> torch.device:
        """Where the inputs are."""
        found: list[torch.device] = []
        trees.over(lambda _, leaf: found.append(leaf.device), "inputs", self.sources)
        return found[0] if found else torch.device("cpu")

    @property
    def rows(self) -> int:
        return len(self.cond) + sum(row is not None for row in self.uncond)

    def take(self, rows: Sequence[int], inputs: Inputs | None = None) -> Inputs:
        """The inputs of these rows; `inputs` are what was made of the sources, if something was."""
        tree, key = self.sources if inputs is None else inputs, tuple(rows)
        if key == tuple(range(self.rows)):
            return tree
        found = self.taken.get(key)
        if found is None or found[0] is not tree:
            self.taken.clear()  # the rows of another step
            found = self.taken[key] = tree, trees.pick(tree, key)
        return found[1]

    def rows_of(self, images: Sequence[int]) -> list[int]:
        """The rows of the inputs that these images read, those without a prompt first."""
        return [*(row for i in images if (row := self.uncond[i]) is not None), *(self.cond[i] for i in images)]

    def select(self, images: Sequence[int]) -> Calls:
        """The calls of some images."""
        uncond, cond = [self.uncond[i] for i in images], [self.cond[i] for i in images]
        rows = self.rows_of(images)
        place = {row: k for k, row in enumerate(rows)}
        found = tuple(None if row is None else place[row] for row in uncond)
        return Calls(trees.pick(self.sources, rows), tuple(place[row] for row in cond), found)

    def merge(self, other: Calls) -> Calls | None:
        """The calls of both; None where their inputs are of different forms."""
        both = trees.even(self.sources, other.sources)
        if both is None:
            return None
        size = self.rows
        uncond = (*self.uncond, *(None if row is None else size + row for row in other.uncond))
        return Calls(trees.join(*both), (*self.cond, *(size + row for row in other.cond)), uncond)


@dataclass(frozen=True)
class Sources:
    """The inputs of all calls that a run can make, with what depends on the time beforehand where the network can."""

    inputs: Inputs
    place: Mapping[float, int] = field(default_factory=dict)  # of each time of the run's plans
    table: Tensor | None = None  # (T, S)
    index: Tensor | None = None  # (sources or 1, times): rows of the table

    @staticmethod
    def of(run: GuidedRun) -> Sources:
        hoist, plans = getattr(run.owner.network, "hoist", None), [image.plan for image in run.images]
        device = run.calls.device
        if hoist is None or torch.is_grad_enabled() or device.type == "meta" or None in plans:
            return Sources(run.calls.sources)
        times = sorted({row.time for plan in plans if plan is not None for row in plan.rows})
        found = hoist(torch.tensor(times, dtype=torch.float32, device=device), run.calls.sources)
        if found is None:
            return Sources(run.calls.sources)
        return Sources(found.inputs, {time: k for k, time in enumerate(times)}, found.table, found.index)

    def select(self, rows: Sequence[int]) -> Sources | None:
        """What is left of it when only these rows of the inputs are; None where it is as well made anew."""
        if self.table is None or self.index is None:
            return None
        index = self.index if len(self.index) == 1 else self.index[list(rows)]
        return replace(self, inputs=trees.pick(self.inputs, rows), index=index)

    def merge(self, other: Sources, counts: tuple[int, int], needed: int) -> Sources | None:
        """Both as one, the other's rows behind its own: `counts` says how many these are.

        None where their texts differ in length, or where the table would be much larger than the `needed` rows,
        because most of it is of times that have passed.
        """
        if self.table is None or self.index is None or other.table is None or other.index is None:
            return None
        if not trees.alike(self.inputs, other.inputs) or len(self.table) + len(other.table) > 2 * needed:
            return None
        place = {time: k for k, time in enumerate(sorted({*self.place, *other.place}))}
        index = torch.zeros(sum(counts), len(place), dtype=torch.int64, device=self.table.device)
        for one, first, count, start in ((self, 0, counts[0], 0), (other, counts[0], counts[1], len(self.table))):
            assert one.index is not None
            at = torch.tensor([place[time] for time in one.place], device=index.device)  # in the order of its columns
            index[first : first + count, at] = one.index.expand(count, -1) + start
        return Sources(trees.join(self.inputs, other.inputs), place, torch.cat([self.table, other.table]), index)

    def rows(self, calls: Sequence[int], times: Sequence[float]) -> Tensor | None:
        """The rows of the table for calls at their times; None without a table, where the time itself is passed."""
        if self.table is None or self.index is None:
            return None
        at = [self.place[time] for time in times]
        if len(self.index) == 1 and all(place == at[0] for place in at):
            return self.table[self.index[0, at[0]]].expand(len(calls), -1)
        sources = torch.tensor([0] * len(calls) if len(self.index) == 1 else list(calls), device=self.table.device)
        return self.table[self.index[sources, torch.tensor(at, device=self.table.device)]]


@dataclass
class GuidedRun:
    """One run of a guided denoiser: its images, the calls that they make, and what their rules remember.

    Images with other rules share the network's calls. An image that is not guided at a row makes one call there.
    """

    owner: GuidedDenoiser
    images: list[ImageGuidance]
    calls: Calls
    groups: list[RuleGroup] = field(default_factory=list)
    sources: Sources | None = None  # made by the first call

    def __post_init__(self) -> None:
        if not self.groups:
            together: dict[Any, list[int]] = {}
            for i, image in enumerate(self.images):
                together.setdefault(image.rules, []).append(i)
            self.groups = [RuleGroup(self.owner, at, [self.images[i] for i in at]) for at in together.values()]

    @property
    def past(self) -> tuple[Tensor | None, ...]:
        """What the rules remember of the calls before this one."""
        return tuple(group.past for group in self.groups)

    @past.setter
    def past(self, past: tuple[Tensor | None, ...]) -> None:
        for group, own in zip(self.groups, past, strict=True):
            group.past = own

    def select(self, images: Sequence[int]) -> GuidedRun:
        if len(images) == len(self.images):
            return self
        groups = [group.select(images) for group in self.groups]
        chosen, calls = [self.images[i] for i in images], self.calls.select(images)
        sources = self.sources and self.sources.select(self.calls.rows_of(images))
        return GuidedRun(self.owner, chosen, calls, [g for g in groups if g.at], sources)

    def merge(self, other: object) -> GuidedRun | None:
        """Both runs as one, where they call the same network in the same way."""
        if not isinstance(other, GuidedRun) or not self.owner.calls_as(other.owner):
            return None
        calls = self.calls.merge(other.calls)
        if calls is None:
            return None
        first = len(self.images)
        groups = [replace(group) for group in self.groups]
        for group in other.groups:
            moved = replace(group, at=[first + i for i in group.at])
            same = next((g for g in groups if g.joins(moved)), None)
            if same is None:
                groups.append(moved)
            else:
                same.extend(moved)
        images, sources = [*self.images, *other.images], None
        unpadded = trees.alike(self.calls.sources, other.calls.sources)
        if unpadded and self.sources is not None and self.sources.table is not None:  # only what is new is made
            needed = 2 * sum(len(image.plan.rows) for image in images if image.plan is not None)
            sources = self.sources.merge(Sources.of(other), (self.calls.rows, other.calls.rows), needed)
        return GuidedRun(self.owner, images, calls, groups, sources)

    def __call__(self, x: Tensor, level: Any, time: Any) -> Prediction:
        if len(x) != len(self.images):
            raise PellucidError(rule("x", f"a batch of {len(self.images)} images, as bound", len(x)), "shape")
        levels = split(level) if isinstance(level, BatchLevel) else [level]
        doses = self.doses(levels)
        times = level.times if isinstance(level, BatchLevel) and level.times else time
        return self.settle(x, levels, self.predict(x, levels, times, doses), doses)

    def settle(
        self, x: Tensor, levels: Sequence[Level], outputs: Mapping[str, Tensor], doses: Sequence[Dose] | None = None
    ) -> Prediction:
        """The guided x0 of every image, from the network's outputs for the batch."""
        doses = self.doses(levels) if doses is None else doses
        made = [group.settle(x, levels, doses, outputs) for group in self.groups]
        return made[0] if len(made) == 1 else _together(x, self.groups, made)

    def doses(self, levels: Sequence[Level]) -> list[Dose]:
        """One for all images where they agree, or one per image."""
        first = self.images[0].bound
        if len(levels) == 1 and all(image.bound is first for image in self.images):
            return [first.at(levels[0])]
        found = [image.bound.at(levels[i % len(levels)]) for i, image in enumerate(self.images)]
        return found[:1] if all(dose == found[0] for dose in found) else found

    def asks_uncond(self, doses: Sequence[Dose]) -> list[int]:
        """The images that make an unconditional call."""
        asking = []
        for i, (image, row) in enumerate(zip(self.images, self.calls.uncond, strict=True)):
            dose = doses[i % len(doses)]
            if not dose.zero and (dose.guided or (row is not None and image.apart_at(dose))):
                asking.append(i)
        return asking

    def predict(self, x: Tensor, levels: Sequence[Level], times: Any, doses: Sequence[Dose]) -> dict[str, Tensor]:
        """Asks the network for every prediction that some image needs at this level, as raw outputs of the batch.

        `times` are those of the images: one number, a tensor, or a list of numbers.
        """
        owner, calls, count = self.owner, self.calls, len(x)
        if all(dose.zero for dose in doses):
            return {}
        scales = [input_scale(owner.schedule, level) for level in levels]
        scaled = x if all(s == 1.0 for s in scales) else x * column(scales, x, len(scales) == 1)
        scaled = scaled if owner.dtype is None else scaled.to(owner.dtype)
        asking, everyone = self.asks_uncond(doses), list(range(count))
        without = [row for i in asking if (row := calls.uncond[i]) is not None]
        times = times.to(x) if isinstance(times, Tensor) else times
        out = self.call(owner.network, scaled, times, [*asking, *everyone], [*without, *calls.cond])
        if not asking:
            found = {"cond": read(out, x)}
        else:
            uncond, cond = read(out, x, len(asking) + count).split_with_sizes([len(asking), count])
            # an image that is not guided has the prediction with its prompt
            found = {"cond": cond, "uncond": uncond if len(asking) == count else _spread(uncond, asking, cond)}
        for group in self.groups:
            for term, (network, told) in group.asks_terms(doses).items():
                out = self.call(network, scaled, times, group.at, [calls.cond[i] for i in group.at], **told)
                made = read(out, x, len(group.at))
                found[term] = made if len(made) == count else _spread(made, group.at, found.get(term, found["cond"]))
        return found

    def call(self, network: Network, x: Tensor, times: Any, images: list[int], rows: list[int], **more: Any) -> Tensor:
        """The network's outputs for calls of these images with these rows of the inputs."""
        everyone = list(range(len(x)))
        own = x if images == everyone else torch.cat([x, x]) if images == everyone * 2 else x[images]
        if isinstance(times, Tensor):
            return network(own, times.expand(len(x))[images], **self.calls.take(rows), **more)
        listed = [times[i] for i in images] if isinstance(times, Sequence) else [times] * len(images)
        if network is self.owner.network:
            self.sources = self.sources or Sources.of(self)
            made = self.sources.rows(rows, listed)
            inputs = self.calls.take(rows, self.sources.inputs)
            if made is not None:
                return network(own, hoisted=made, **inputs, **more)
        else:
            inputs = self.calls.take(rows)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        if all(time == listed[0] for time in listed):
            told = torch.full((len(listed),), listed[0], dtype=wide, device=x.device)  # nothing waits for the device
        else:
            told = torch.tensor(listed, dtype=wide, device=x.device)
        return network(own, told, **inputs, **more)


def _spread(part: Tensor, at: Sequence[int], whole: Tensor) -> Tensor:
    """A batch with other values at some positions."""
    return whole.clone().index_copy_(0, torch.tensor(list(at), device=whole.device), part)


def _together(x: Tensor, groups: Sequence[RuleGroup], made: Sequence[Prediction]) -> Prediction:
    """The predictions of groups of images as one batch; by name, those of an image without a rule are its x0."""
    order = torch.tensor([i for group in groups for i in group.at], device=x.device).argsort()

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors))[order]

    x0 = joined([one.x0 for one in made])
    apart = any(one.uncond is not None for one in made)
    uncond = joined([one.x0 if one.uncond is None else one.uncond for one in made]) if apart else None
    names = list(dict.fromkeys(name for one in made for name in one.parts))
    reads = {name: partial(_read_part, joined, made, name) for name in names}
    return Prediction(x0, uncond, _Parts(reads))


def _read_part(joined: Callable[[Sequence[Tensor]], Tensor], made: Sequence[Prediction], name: str) -> Tensor:
    return joined([one.parts.get(name, one.x0) for one in made])


class _Parts(Mapping[str, Tensor]):
    """Predictions by name, made when they are read."""

    def __init__(self, reads: Mapping[str, Callable[[], Tensor]]) -> None:
        self.reads = reads

    def __getitem__(self, name: str) -> Tensor:
        return self.reads[name]()

    def __contains__(self, name: object) -> bool:
        return name in self.reads

    def __iter__(self) -> Iterator[str]:
        return iter(self.reads)

    def __len__(self) -> int:
        return len(self.reads)


@dataclass
class RuleGroup:
    """Images of one run with the same rules, and what these remember."""

    owner: GuidedDenoiser
    at: list[int]  # the positions of its images in the batch
    images: list[ImageGuidance]
    past: Tensor | None = None

    @property
    def guidance(self) -> Guidance:
        """The rules, which all of its images share."""
        return self.images[0].bound.guidance

    @property
    def filters(self) -> bool:
        """Whether x0 is filtered, or kept from before its filter."""
        return self.images[0].x0_filter is not None or self.images[0].keep_raw

    @property
    def plain(self) -> bool:
        """Whether all that happens is plain classifier-free guidance, which is the same in every space."""
        acts = self.guidance.acts
        return not self.filters and all(isinstance(act, CFG) for act in acts)

    @property
    def remembers(self) -> bool:
        """Whether a rule depends on the calls before, or leaves calls out."""
        way = self.guidance.combination
        return (isinstance(way, APG) and bool(way.momentum)) or (isinstance(way, CFGZero) and way.zero_steps > 0)

    def select(self, images: Sequence[int]) -> RuleGroup:
        """What is left of it when only these images of the batch run on, at their new positions."""
        place = {image: k for k, image in enumerate(images)}
        kept = [k for k, image in enumerate(self.at) if image in place]
        past = None if self.past is None or not kept else self.past[kept]
        return replace(self, at=[place[self.at[k]] for k in kept], images=[self.images[k] for k in kept], past=past)

    def joins(self, other: RuleGroup) -> bool:
        """Whether another run's group has the same rules; those that remember are left apart."""
        alone = self.past is not None or other.past is not None
        return not alone and self.images[0].rules == other.images[0].rules and self.owner.weak is other.owner.weak

    def extend(self, other: RuleGroup) -> None:
        self.at, self.images = [*self.at, *other.at], [*self.images, *other.images]

    def asks_terms(self, doses: Sequence[Dose]) -> dict[str, tuple[Network, dict[str, Any]]]:
        """What the extra terms that act now are made of: by which network, and what is passed to it besides."""
        found: dict[str, tuple[Network, dict[str, Any]]] = {}
        own = self.doses_of(doses)
        for k, extra in enumerate(self.guidance.extras):
            if any(dose.extras[k] for dose in own):
                network = self.owner.weak if isinstance(extra, AutoGuidance) else self.owner.network
                assert network is not None
                found[extra.term] = network, extra.told
        return found

    def doses_of(self, doses: Sequence[Dose]) -> Sequence[Dose]:
        """The doses of its images, one for all where they agree."""
        if len(doses) == 1:
            return doses
        own = [doses[i] for i in self.at]
        return own[:1] if all(dose == own[0] for dose in own) else own

    def settle(
        self, x: Tensor, levels: Sequence[Level], doses: Sequence[Dose], outputs: Mapping[str, Tensor]
    ) -> Prediction:
        """The guided x0 of its images, from the network's outputs for the batch."""
        owner, whole = self.owner, len(self.at) == len(x)
        own = x if whole else x[self.at]
        if len(levels) > 1:
            levels = [levels[i] for i in self.at]
        terms = Terms(own, levels, owner.schedule, owner.target)
        named = {"cond", "uncond", *(extra.term for extra in self.guidance.extras)}
        for name in outputs:
            if name in named:
                terms.put(name, "raw", outputs[name] if whole else outputs[name][self.at])
        mine = HostDoses(self.doses_of(doses), self.images, own)
        terms.scales = tuple(dose.scale for dose in mine.doses)
        return self.apply(terms, mine)

    def apply(self, terms: Terms, doses: Doses) -> Prediction:
        """The rules, in their order, on the predictions of a call."""
        name = ""
        if "cond" in terms:
            name = self.correct(terms, self.add(terms, self.combine(terms, doses), doses), doses)
        if doses.any("zero"):
            name = self.zero(terms, name, doses)
        x0 = self.finish(terms, name, doses)
        first = self.images[0]
        x0 = x0 if first.x0_filter is None else first.x0_filter(x0)
        return Prediction(x0, terms[name] if first.keep_raw else self.uncond_apart(terms, x0, doses), terms)

    def combine(self, terms: Terms, doses: Doses) -> str:
        """cond and uncond into one; an image whose scale is 1 keeps cond."""
        if not doses.any("guided"):
            return "cond"
        way = self.guidance.combination
        cond, uncond = terms.within("cond", way.space), terms.within("uncond", way.space)
        guided, past = way.combine(cond, uncond, doses.scale, self.past)
        on = doses.mask("guided")
        if on is not None:
            guided = torch.where(on, guided, cond)
            if past is not None:
                past = torch.where(on, past, 0.0 if self.past is None else self.past)
        self.past = past
        return terms.put(way.name, way.space, guided)

    def add(self, terms: Terms, name: str, doses: Doses) -> str:
        """Away from each worse prediction; in the space of the combination, since it is the same in all."""
        space = self.guidance.combination.space
        for k, extra in enumerate(self.guidance.extras):
            if extra.term in terms:
                away = terms.within("cond", space) - terms.within(extra.term, space)
                name = terms.put(extra.name, space, along(terms.within(name, space), away, doses.weight(k)))
        return name

    def correct(self, terms: Terms, name: str, doses: Doses) -> str:
        """Rescale, then the range. An image that nothing has changed is left as it is."""
        for way in self.guidance.corrections:
            wanted = "guided" if way.compares else "changed"
            if not doses.any(wanted):
                continue
            guided, cond = terms.within(name, way.space), terms.within("cond", way.space)
            uncond = terms.within("uncond", way.space) if way.compares else None
            better = way.correct(guided, cond, uncond)
            on = doses.mask(wanted)
            name = terms.put(way.name, way.space, better if on is None else torch.where(on, better, guided))
        return name

    def zero(self, terms: Terms, name: str, doses: Doses) -> str:
        """CFG-Zero*: the first steps predict nothing, in the space of the rule."""
        way = self.guidance.combination
        assert isinstance(way, CFGZero)
        on = doses.mask("zero")
        empty = torch.zeros_like(terms.x) if on is None else terms.within(name, way.space).masked_fill(on, 0.0)
        return terms.put("zero_init", way.space, empty)

    def finish(self, terms: Terms, name: str, doses: Doses) -> Tensor:
        """The x0 of the last rule; that of cond, bit by bit, for an image that nothing changed in a batch of others."""
        on = None if doses.alike or name == "cond" else doses.mask("moved")
        return terms[name] if on is None else torch.where(on, terms[name], terms["cond"])

    def uncond_apart(self, terms: Terms, x0: Tensor, doses: Doses) -> Tensor | None:
        """The unconditional x0 for the samplers that use it; an image that is not guided has x0 in its place."""
        if "uncond" not in terms or not doses.any("apart"):
            return None
        on = doses.mask("apart")
        return terms["uncond"] if on is None else torch.where(on, terms["uncond"], x0)


class Doses(Protocol):
    """What the rules ask of the doses at one call. A mask has one truth per image; None where all are true."""

    @property
    def alike(self) -> bool: ...

    @property
    def scale(self) -> Any: ...

    def weight(self, extra: int) -> Any: ...

    def any(self, what: str) -> bool: ...

    def mask(self, what: str) -> Tensor | None: ...


class HostDoses:
    """Doses as numbers of the host: one for all images, or one per image."""

    def __init__(self, doses: Sequence[Dose], images: Sequence[ImageGuidance], like: Tensor) -> None:
        self.doses, self.images, self.like = doses, images, like

    @property
    def alike(self) -> bool:
        return len(self.doses) == 1

    @property
    def scale(self) -> Any:
        return column([dose.scale for dose in self.doses], self.like, self.alike)

    def weight(self, extra: int) -> Any:
        return column([dose.extras[extra] for dose in self.doses], self.like, self.alike)

    def wanted(self, what: str) -> list[bool]:
        if what == "apart":
            each = [*self.doses] * (len(self.images) // len(self.doses))
            return [image.apart_at(dose) for image, dose in zip(self.images, each, strict=True)]
        return [bool(getattr(dose, what)) for dose in self.doses]

    def any(self, what: str) -> bool:
        return any(self.wanted(what))

    def mask(self, what: str) -> Tensor | None:
        wanted = self.wanted(what)
        if all(wanted):
            return None
        return torch.tensor(wanted, device=self.like.device).reshape(-1, *([1] * (self.like.ndim - 1)))


def read(out: Tensor, x: Tensor, count: int | None = None) -> Tensor:
    """The output of `count` calls, by default one per image, in x's precision, without a learned variance."""
    return without_variance(out, x, count).to(x.dtype)


def without_variance(out: Tensor, x: Tensor, count: int | None = None) -> Tensor:
    """The output of `count` calls without the channels of a learned variance."""
    wanted = (len(x) if count is None else count, *x.shape[1:])
    if x.ndim > 1 and out.ndim == x.ndim and out.shape[1] == 2 * x.shape[1]:
        out = out[:, : x.shape[1]]
    if tuple(out.shape) != wanted:
        raise PellucidError(rule("output of the network", f"of shape {wanted}", tuple(out.shape)), "shape")
    return out
