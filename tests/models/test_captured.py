"""Device steps: the program that a GPU captures, run as it is on the CPU, against the plain step."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles import randomise
from plain_kernels import fused_on_cpu
from test_unet import CONFIGS, inputs_of
from torch import Tensor, nn

from pellucid import Clip, PellucidError, Philox, TorchStream, compile_plan, schedules
from pellucid.core import samplers
from pellucid.core.batch import Batch, Entry, StepSeen
from pellucid.core.loop import loop
from pellucid.models import attention, ops
from pellucid.models import inputs as trees
from pellucid.models.captured import StepGraphs, bucket
from pellucid.models.guidance import Guidance
from pellucid.models.guided import GuidedDenoiser
from pellucid.models.lora import view
from pellucid.models.unet import UNet
from pellucid.models.unet_config import UNetConfig, read

SCALED = schedules.make("scaled_linear")
SHAPE = (4, 8, 8)
GUIDANCES = (
    *(
        "7",
        "1",
        "guarded 9",
        "5 + interval start=0.2 stop=0.7",
        "3 + rescale + mimic",
        "linear:9:2",
        "6 + apg momentum=0",
    ),
    "4 + threshold",
)


class Toy(nn.Module):
    """A network that takes a text, and keeps how many calls it got."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.3))
        self.calls: list[int] = []

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        self.calls.append(len(x))
        push = context.mean((1, 2)) * self.weight
        return x * (0.2 + 0.6 * time.reshape(-1, 1, 1, 1) / 1000) / (1.0 + x * x) + push[:, None, None, None]


def unet() -> UNet:
    torch.manual_seed(0)
    config = UNetConfig(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    return UNet(config).eval().requires_grad_(False)


def entry(network: nn.Module, sampler: str, steps: int, seed: int, guidance: str, **more: Any) -> Entry:
    generator = torch.Generator().manual_seed(seed)
    cond, uncond = ({"context": torch.randn(1, 6, 16, generator=generator)} for _ in range(2))
    plan, noise = compile_plan(sampler, steps=steps), Philox(seed)
    options = {key: more.pop(key) for key in ("x0_filter",) if key in more}
    own = GuidedDenoiser(network, SCALED, "eps", cond, uncond, Guidance.parse(guidance), **options)
    return Entry([plan], own, noise.first(SHAPE, torch.empty(0), [0]) * plan.initial_scale, noise, **more)


def drain(entries: Sequence[Entry], graphs: StepGraphs | None, seed: int = 0) -> Batch:
    rng, waiting = random.Random(seed), list(entries)
    network: Any = waiting[0].denoiser.network  # type: ignore[attr-defined]
    batch = Batch(stepper=None if graphs is None else graphs.stepper([network], capture=False))
    with torch.no_grad():
        while batch.entries or waiting:
            while waiting and (not batch.entries or rng.random() < 0.5):
                batch.join(waiting.pop(0))
            batch.step()
            if graphs is not None and batch.entries and batch.stepper is not None:
                assert batch.stepper.why == ""  # type: ignore[attr-defined]
    if batch.stepper is not None:
        batch.stepper.close()
    for one in entries:
        assert one.error is None
    return batch


def every_sampler(first_seed: int) -> list[tuple[str, int, int, str]]:
    """(sampler, steps, seed, guidance): all different in as much as they can be."""
    asked = []
    for k, name in enumerate(samplers.names()):
        try:
            compile_plan(name, steps=5)
        except PellucidError:  # a sampler of another schedule
            continue
        asked.append((name, 3 + k % 6, first_seed + k, GUIDANCES[k % len(GUIDANCES)]))
    return asked


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("guidance", GUIDANCES)
def test_a_program_is_the_plain_step(guidance: str) -> None:
    network = Toy()
    made = [entry(network, name, 7, 3, guidance) for name in ("dpmpp_2m", "dpmpp_2m")]
    drain(made[:1], None)
    drain(made[1:], StepGraphs())
    assert off(made[1].result, made[0].result) < 3e-6
    assert network.calls[:7] == network.calls[7:]  # an image that is not guided at a row makes one call there too


def test_every_sampler_joins_and_leaves() -> None:
    asked = every_sampler(first_seed=0)
    assert len(asked) > 25
    network = Toy()
    plain, device = ([entry(network, *one) for one in asked] for _ in range(2))
    drain(plain, None)
    drain(device, StepGraphs(), seed=1)
    for one, wanted, found in zip(asked, plain, device, strict=True):
        assert off(found.result, wanted.result) < 1e-5, one


@pytest.mark.parametrize("sampler", ["euler_cfgpp", "dpmpp_2m_cfgpp"])
@pytest.mark.parametrize("more", [{}, {"x0_filter": Clip(0.7)}])
def test_samplers_that_keep_the_unconditional_prediction(sampler: str, more: dict[str, Any]) -> None:
    made = [entry(Toy(), sampler, 6, 1, "2 + rescale", **more) for _ in range(2)]
    drain(made[:1], None)
    drain(made[1:], StepGraphs())
    assert off(made[1].result, made[0].result) < 3e-6


def test_a_real_unet_with_its_text_and_times_hoisted() -> None:
    network = unet()
    made = [[entry(network, "heun", 4, 5, "guarded 9"), entry(network, "euler_a", 6, 6, "1")] for _ in range(2)]
    drain(made[0], None)
    drain(made[1], StepGraphs())
    for wanted, found in zip(*made, strict=True):
        assert off(found.result, wanted.result) < 2e-5


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_who_joins_is_hoisted_and_who_stays_is_not(name: str, steps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SDXL's time embedding depends on the image too. Prompts of two images each: joined, and left at other steps."""
    network, seen = randomise(UNet(read(CONFIGS[name]))), list[int]()
    hoist = UNet.hoist

    def counted(self: UNet, times: Tensor, inputs: Any) -> Any:
        seen.append(trees.rows(inputs))
        return hoist(self, times, inputs)

    def asked(seed: int, steps: int, sampler: str) -> Entry:
        inputs = [inputs_of(CONFIGS[name], batch=2, seed=seed + k) for k in range(2)]
        x = inputs[0]["x"]
        cond, uncond = ({k: v for k, v in one.items() if k not in ("x", "time")} for one in inputs)
        plan = compile_plan(sampler, steps=steps)
        own = GuidedDenoiser(network, SCALED, "eps", cond, uncond, Guidance.parse("5"))
        return Entry([plan] * 2, own, x, Philox([seed, seed + 1]))

    monkeypatch.setattr(UNet, "hoist", counted)
    alone = [asked(1, 6, "euler"), asked(3, 3, "dpmpp_2m"), asked(5, 8, "heun"), asked(7, 2, "ddim")]
    with torch.no_grad():
        wanted = [loop(one.plans, one.denoiser, one.x, one.noise, (), (), None) for one in alone]
        assert seen == [4] * 4  # each of its own, with and without the prompt
        seen.clear()
        made = [asked(1, 6, "euler"), asked(3, 3, "dpmpp_2m"), asked(5, 8, "heun"), asked(7, 2, "ddim")]
        batch = Batch(stepper=StepGraphs().stepper([network], capture=False) if steps else None)
        for entry in made[:2]:
            batch.join(entry)
        batch.step()
        assert seen == [8]
        for entry in made[2:]:
            batch.join(entry)
            batch.step()
        while batch.entries:
            batch.step()
    assert seen == [8, 4, 4]
    for found, result in zip(made, wanted, strict=True):
        assert off(found.result, result) < 2e-5


def test_observers_see_the_same_steps() -> None:
    seen: list[list[StepSeen]] = [[], []]
    network = Toy()
    for graphs, own in ((None, seen[0]), (StepGraphs(), seen[1])):
        drain([entry(network, "dpmpp_2m", 5, 2, "7", observers=[own.append])], graphs)
    for wanted, found in zip(*seen, strict=True):
        assert (found.index, found.images, found.rows) == (wanted.index, wanted.images, wanted.rows)
        for name in ("x", "x0", "x_next"):
            assert off(getattr(found, name), getattr(wanted, name)) < 3e-6
        for name in ("cond", "uncond"):
            assert off(found.parts[name], wanted.parts[name]) < 3e-6


def test_a_constraint_holds() -> None:
    def half(step: StepSeen) -> Tensor:
        return step.x_next * 0.5

    made = [entry(Toy(), "heun", 4, 2, "7", constraints=[half]) for _ in range(2)]
    drain(made[:1], None)
    drain(made[1:], StepGraphs())
    assert off(made[1].result, made[0].result) < 3e-6


def test_over_the_kernels_noise_is_drawn_where_the_registers_say() -> None:
    """Every sampler, with seeds of 64 bits, churn and overlapping spans; images that draw nothing get zeros."""
    asked = every_sampler(first_seed=2**64 - 100)
    network = Toy()
    plain, device = ([entry(network, *one) for one in asked] for _ in range(2))
    drain(plain, None)
    with fused_on_cpu() as kernels:
        drain(device, StepGraphs(), seed=1)
    for one, wanted, found in zip(asked, plain, device, strict=True):
        assert off(found.result, wanted.result) < 1e-5, one
    assert kernels.calls["normals"] > 20
    assert kernels.calls["scaled_input"] >= kernels.calls["update_rows"] > 0


def test_noise_of_other_kinds_is_drawn_as_ever() -> None:
    made = [entry(Toy(), "euler_a", 30, 3, "1") for _ in range(2)]
    for one in made:
        one.noise = TorchStream(3)
    drain(made[:1], None)
    with fused_on_cpu() as kernels:
        drain([made[1], entry(made[1].denoiser.network, "euler_a", 3, 4, "7")], StepGraphs())  # type: ignore[attr-defined]
    assert off(made[1].result, made[0].result) < 3e-6
    assert "normals" not in kernels.calls
    assert kernels.calls["update_rows"]


@pytest.mark.parametrize("guidance", ["7", "3 + rescale + mimic", "guarded 9", "1"])
def test_the_parts_of_a_step_are_those_of_the_plain_one(guidance: str) -> None:
    """By name and by number, also where two images share the batch."""
    seen: list[list[StepSeen]] = [[], []]
    network = Toy()
    for graphs, own in ((None, seen[0]), (StepGraphs(), seen[1])):
        drain([entry(network, "euler", 4, 2, guidance, observers=[own.append])], graphs)
    for wanted, found in zip(*seen, strict=True):
        assert list(found.parts) == list(wanted.parts)
        assert found.parts.scales == wanted.parts.scales  # type: ignore[attr-defined]
        for name in wanted.parts:
            assert off(found.parts[name], wanted.parts[name]) < 1e-5


def test_other_weights_never_run_in_an_old_program() -> None:
    """An adapter is swapped in and out, and the base's own weights are changed in place."""
    base, graphs = unet(), StepGraphs()
    other = view(base, {"conv_in": {"weight": base.conv_in.weight * 1.3}})
    for network in (base, other, base, other):
        wanted, found = entry(network, "euler", 3, 5, "7"), entry(network, "euler", 3, 5, "7")
        drain([wanted], None)
        drain([found], graphs)
        assert off(found.result, wanted.result) < 2e-5
    assert sum(len(one.programs) for one in graphs.free) == 2
    with torch.no_grad():
        base.conv_in.weight.mul_(0.7)
    wanted, found = entry(base, "euler", 3, 5, "7"), entry(base, "euler", 3, 5, "7")
    drain([wanted], None)
    drain([found], graphs)
    assert off(found.result, wanted.result) < 2e-5


def test_a_network_that_is_forgotten_is_let_go() -> None:
    base, graphs = unet(), StepGraphs()
    other = view(base, {"conv_in": {"weight": base.conv_in.weight * 1.3}})
    for network in (base, other):
        drain([entry(network, "euler", 3, 5, "7")], graphs)
        graphs_stepper_closed(graphs, network)
    assert sum(len(one.programs) for one in graphs.free) == 2
    gone = weakref.ref(other)
    graphs.forget(other)
    del other, network
    gc.collect()
    assert gone() is None
    assert sum(len(one.programs) for one in graphs.free) == 1


def test_another_kernel_of_attention_and_plain_operations_have_programs_of_their_own() -> None:
    network, graphs = unet(), StepGraphs()
    drain([entry(network, "euler", 3, 5, "7")], graphs)
    with attention.backend("math"):
        drain([entry(network, "euler", 3, 5, "7")], graphs)
    with ops.using(fused=False):
        drain([entry(network, "euler", 3, 5, "7")], graphs)
    drain([entry(network, "euler", 3, 6, "7")], graphs)
    assert sum(len(one.programs) for one in graphs.free) == 3


def test_a_batch_that_never_ends_keeps_few_programs() -> None:
    network, batch = Toy(), Batch(stepper=StepGraphs(most=3).stepper([], capture=False))
    batch.join(entry(network, "euler", 40, 0, "linear:9:2"))
    with torch.no_grad():
        for seed, guidance in enumerate(GUIDANCES):
            batch.join(entry(network, "euler", 1, seed, guidance))
            batch.step()
            assert batch.stepper is not None
            assert len(batch.stepper.registers.programs) <= 3  # type: ignore[attr-defined]


def test_registers_outlive_the_mode_of_their_first_run() -> None:
    network, graphs = unet(), StepGraphs()
    made = [entry(network, "euler_a", 3, 5, "7") for _ in range(2)]
    with torch.inference_mode():
        drain(made[:1], graphs)
    drain(made[1:], graphs)
    assert torch.equal(made[0].result, made[1].result)


def test_an_emptied_batch_takes_another_shape() -> None:
    network = Toy()
    batch = Batch(stepper=StepGraphs().stepper([network], capture=False))
    for shape in ((4, 8, 8), (4, 6, 10), (4, 8, 8)):
        made, plain = entry(network, "heun", 3, 1, "7"), entry(network, "heun", 3, 1, "7")
        for one in (made, plain):
            one.x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
            one.result = torch.empty_like(one.x)
        drain([plain], None)
        with torch.no_grad():
            batch.join(made)
            while batch.entries:
                batch.step()
        assert off(made.result, plain.result) < 3e-6


def test_a_step_that_fails_ends_its_entries_and_not_the_batch() -> None:
    class Fails(Toy):
        def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
            if self.calls:
                raise RuntimeError("no more")
            return super().forward(x, time, context)

    network = Fails()
    made, batch = entry(network, "euler", 4, 1, "7"), Batch(stepper=StepGraphs().stepper([], capture=False))
    with torch.no_grad():
        batch.join(made)
        batch.step()
        assert batch.step() == [made]
        assert str(made.error) == "no more"
        again = entry(Toy(), "euler", 4, 1, "7")
        batch.join(again)
        while batch.entries:
            batch.step()
    assert again.error is None


def test_registers_and_programs_are_used_again() -> None:
    graphs, network = StepGraphs(), Toy()
    for seed in range(5):
        drain([entry(network, "euler", 4, seed, "7")], graphs)
        graphs_stepper_closed(graphs, network)
    assert len(graphs.free) == 1
    assert len(graphs.free[0].programs) == 1


def graphs_stepper_closed(graphs: StepGraphs, network: nn.Module) -> None:
    """A stepper that a batch has left gives its registers back."""
    made = entry(network, "euler", 4, 9, "7")
    batch = Batch(stepper=graphs.stepper([network], capture=False))
    with torch.no_grad():
        batch.join(made)
        while batch.entries:
            batch.step()
    assert batch.stepper is not None
    batch.stepper.close()


def test_the_programs_used_longest_ago_go() -> None:
    graphs, network = StepGraphs(most=2), Toy()
    for count in (1, 2, 3):
        made = [entry(network, "euler", 3, seed, "7") for seed in range(count)]
        batch = Batch(stepper=graphs.stepper([network], capture=False))
        with torch.no_grad():
            for one in made:
                batch.join(one)
            while batch.entries:
                batch.step()
        assert batch.stepper is not None
        batch.stepper.close()
    assert sorted(one.count for one in graphs.free) == [2, 3]


@pytest.mark.parametrize(
    ("guidance", "why"),
    [("5 + apg", "memory of a rule"), ("4 + pag", "extra terms"), ("4 + cfg_zero", "memory of a rule")],
)
def test_what_a_program_cannot_do_is_stepped_plainly(guidance: str, why: str) -> None:
    class Takes(Toy):
        def forward(self, x: Tensor, time: Tensor, context: Tensor, *, perturbed: tuple[str, ...] = ()) -> Tensor:
            return super().forward(x, time, context) * (0.5 if perturbed else 1.0)

    network = Takes()
    wanted, found = (entry(network, "euler", 4, 1, guidance) for _ in range(2))
    drain([wanted], None)
    batch = Batch(stepper=StepGraphs().stepper([network], capture=False))
    with torch.no_grad():
        batch.join(found)
        batch.step()
        assert batch.stepper is not None
        assert batch.stepper.why == why  # type: ignore[attr-defined]
        while batch.entries:
            batch.step()
    assert torch.equal(found.result, wanted.result)


def test_hooks_that_watch_the_network_are_stepped_plainly() -> None:
    network, made = unet(), None
    seen: list[int] = []
    network.mid_block.register_forward_hook(lambda *_: seen.append(1))
    made = entry(network, "euler", 3, 1, "7")
    batch = Batch(stepper=StepGraphs().stepper([network], capture=False))
    with torch.no_grad():
        batch.join(made)
        batch.step()
    assert batch.stepper is not None
    assert batch.stepper.why == "hooks"  # type: ignore[attr-defined]
    assert seen == [1]


def test_buckets_are_near_their_counts() -> None:
    assert [bucket(n) for n in range(1, 21)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 10, 12, 12, 14, 14, 16, 16, 20, 20, 20, 20]
    assert all(n <= bucket(n) <= 1.25 * n + 1 for n in range(1, 500))


class Breaks:
    """Noise of no kind that a program draws, and which fails at a draw."""

    def __init__(self, seed: int, at: int) -> None:
        self.source, self.left = TorchStream(seed), at

    def first(self, shape: Sequence[int], like: Tensor, images: Sequence[int]) -> Tensor:
        return self.source.first(shape, like, images)

    beside = first

    def step(self, *given: Any) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise OSError("no more noise")
        return self.source.step(*given)


@pytest.mark.parametrize("captured", [False, True])
def test_noise_that_fails_ends_its_own_images(captured: bool) -> None:
    network = Toy()
    made = [entry(network, "euler_a", 6, seed, "7") for seed in (1, 2, 2)]
    made[0].noise, made[1].noise = Breaks(1, 2), Breaks(2, 99)
    made[2].noise = TorchStream(2)
    drain(made[2:], None)
    batch = Batch(stepper=StepGraphs().stepper([network], capture=False) if captured else None)
    steps = 0
    with torch.no_grad():
        for one in made[:2]:
            batch.join(one)
        while batch.entries:
            batch.step()
            steps += 1
    assert steps == 6
    assert isinstance(made[0].error, OSError)
    assert made[1].error is None
    assert off(made[1].result, made[2].result) < 3e-6


def test_inputs_of_another_form_have_a_program_of_their_own() -> None:
    """A part without a tensor, as an image prompt of scale 0 leaves it, is a form too."""

    class Takes(Toy):
        def forward(self, x: Tensor, time: Tensor, context: Tensor, *, image: tuple[Any, ...] = ()) -> Tensor:
            return super().forward(x, time, context)

    network, graphs = Takes(), StepGraphs()
    for more in ({"image": ((),)}, {}, {"image": ((),)}):
        made, plain = (entry(network, "euler", 3, 1, "7") for _ in range(2))
        for one in (made, plain):
            own: Any = one.denoiser
            one.denoiser = replace(own, cond={**own.cond, **more}, uncond={**own.uncond, **more})
        drain([plain], None)
        drain([made], graphs)
        assert off(made.result, plain.result) < 3e-6


def test_nothing_of_a_run_before_is_left_in_the_registers() -> None:
    network, graphs = Toy(), StepGraphs()
    made = entry(network, "euler_a", 4, 1, "7")
    made.noise = Breaks(1, 99)
    batch = Batch(stepper=graphs.stepper([network], capture=False))
    with torch.no_grad():
        batch.join(made)
        batch.step()
        for register in (batch.stepper.registers.pre, batch.stepper.registers.z):  # type: ignore[union-attr]
            register.fill_(float("inf"))
        batch.leave(made)
    batch.stepper.close()  # type: ignore[union-attr]
    wanted, found = (entry(network, "dpmpp_2m", 4, 1, "7") for _ in range(2))
    drain([wanted], None)
    drain([found], graphs)
    assert off(found.result, wanted.result) < 3e-6
