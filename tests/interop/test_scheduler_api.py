"""Scheduler as diffusers' schedulers behave beside the three calls in order: any time, any argument, config, tables."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers
from diffusers.training_utils import compute_snr
from torch import Tensor

from pellucid import PellucidError, Scheduler, compile_plan
from pellucid.interop.diffusers_classes import CLASSES, INTERCHANGEABLE, OFFERS_CHANGE, STEP
from pellucid.interop.scheduler import class_named

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
EDM_LIKE = ("EDMEulerScheduler", "EDMDPMSolverMultistepScheduler", "CosineDPMSolverMultistepScheduler")


def network(x: Tensor, time: Any) -> Tensor:
    return 0.6 * torch.sin(1.3 * x + 0.002 * float(time)) + 0.3 * x


def start(seed: int = 3, shape: tuple[int, ...] = (2, 3, 4, 4)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def seeded(time: Any) -> torch.Generator:
    return torch.Generator().manual_seed(int(time))


def both(class_name: str, **config: Any) -> tuple[Any, Scheduler]:
    peer = getattr(diffusers, class_name)(**config)
    return peer, Scheduler.from_config(peer)


def close(got: Tensor, want: Tensor, part: float = 2e-5) -> None:
    assert want.isfinite().all()
    assert float((got - want).abs().max()) <= part * float(want.abs().max())


def options_of(scheduler: Any, time: Any) -> dict[str, Any]:
    return {"generator": seeded(time)} if "generator" in inspect.signature(scheduler.step).parameters else {}


# --- any time, in any order ------------------------------------------------------------------------------------

STATELESS: list[tuple[str, dict[str, Any]]] = [
    ("DDIMScheduler", {}),
    ("DDIMScheduler", {"clip_sample": False, "set_alpha_to_one": False, "timestep_spacing": "trailing"}),
    ("DDIMScheduler", {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "thresholding": True}),
    ("DDIMParallelScheduler", {"clip_sample": False}),
    ("DDPMScheduler", {}),
    ("DDPMScheduler", {"variance_type": "fixed_large", "clip_sample": False}),
    ("DDPMParallelScheduler", {"prediction_type": "sample"}),
    ("DDIMInverseScheduler", {"clip_sample": False}),
    ("DDIMInverseScheduler", {"set_alpha_to_one": False}),
]


def walks(times: list[int]) -> dict[str, list[int]]:
    """Orders in which people call `step`: they leave times out, they go back, they run two images in turn."""
    return {
        "skipped": times[::2],
        "back": [*times[:4], *times[2:]],
        "in turn": [t for t in times for _ in range(2)],
        "reversed": times[::-1],
    }


@pytest.mark.parametrize("order", ["skipped", "back", "in turn", "reversed"])
@pytest.mark.parametrize(("class_name", "config"), STATELESS, ids=str)
def test_step_uses_the_given_time(class_name: str, config: dict[str, Any], order: str) -> None:
    peer, ours = both(class_name, **SD, **config)
    for scheduler in (peer, ours):
        scheduler.set_timesteps(8)
    states = [start(1), start(2)]
    for i, t in enumerate(walks(peer.timesteps.tolist())[order]):
        x = states[i % 2]
        want = peer.step(network(x, t), t, x, **options_of(peer, t))
        got = ours.step(network(x, t), t, x, **options_of(ours, t))
        close(got.prev_sample, want.prev_sample)
        close(got.pred_original_sample, want.pred_original_sample)
        states[i % 2] = want.prev_sample


@pytest.mark.parametrize("time", [3, 417, 998])
@pytest.mark.parametrize("class_name", ["DDIMScheduler", "DDIMParallelScheduler", "DDIMInverseScheduler"])
def test_step_at_a_time_that_is_not_in_the_list(class_name: str, time: int) -> None:
    peer, ours = both(class_name, **SD)
    for scheduler in (peer, ours):
        scheduler.set_timesteps(8)
    assert time not in peer.timesteps.tolist()
    close(ours.step(network(start(), time), time, start())[0], peer.step(network(start(), time), time, start())[0])
    with pytest.raises(PellucidError, match="between 0 and 999"):
        ours.step(start(), 1000, start())
    with pytest.raises(PellucidError, match=r"timestep must be one of scheduler\.timesteps; got 417\.5"):
        ours.step(start(), 417.5, start())


@pytest.mark.parametrize("class_name", ["DDPMScheduler", "DDPMParallelScheduler"])
@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large"])
def test_ddpm_steps_without_set_timesteps(class_name: str, variance: str) -> None:
    """Training and distillation scripts do: one step from t to t − 1."""
    peer, ours = both(class_name, **SD, variance_type=variance)
    assert ours.num_inference_steps is peer.num_inference_steps is None
    assert ours.timesteps.tolist() == peer.timesteps.tolist()
    for t in (999, torch.tensor(500), 1, 0):
        want = peer.step(network(start(), t), t, start(), generator=seeded(t)).prev_sample
        close(ours.step(network(start(), t), t, start(), generator=seeded(t)).prev_sample, want)
        assert ours.previous_timestep(t) == peer.previous_timestep(t)


@pytest.mark.parametrize("class_name", ["LCMScheduler", "TCDScheduler"])
def test_distilled_samplers_start_from_the_given_time(class_name: str) -> None:
    """Two images in turn: diffusers takes this call's level from the time and the next one's from its index."""
    peer, ours = both(class_name, **SD)
    for scheduler in (peer, ours):
        scheduler.set_timesteps(4)
    times = peer.timesteps.tolist()
    for t in (times[0], times[0], times[1], times[1]):
        want = peer.step(network(start(), t), t, start(), generator=seeded(t), return_dict=False)
        got = ours.step(network(start(), t), t, start(), generator=seeded(t), return_dict=False)
        for a, b in zip(got, want, strict=True):
            close(a, b)


@pytest.mark.parametrize("class_name", ["LCMScheduler", "TCDScheduler"])
def test_distilled_samplers_refuse_a_time_at_or_below_the_next(class_name: str) -> None:
    scheduler = Scheduler.from_config({"_class_name": class_name, **SD})
    for below in (2, 3):
        scheduler.set_timesteps(4)
        times = scheduler.timesteps.tolist()
        scheduler.step(start(), times[0], start())
        with pytest.raises(PellucidError, match=f"timestep must be above {times[2]}, the next of ") as caught:
            scheduler.step(start(), times[below], start())
        assert caught.value.code == "timestep"
        scheduler.step(start(), times[1], start())  # the run is where it was


@pytest.mark.parametrize("class_name", ["DDIMScheduler", "DDPMScheduler", "LCMScheduler", "TCDScheduler"])
def test_the_times_may_be_set_in_another_thread(class_name: str) -> None:
    """For samplers without a history; the others must set them where they run. The latest call counts, each time."""
    peer, ours = both(class_name, **SD)
    with ThreadPoolExecutor(1) as worker:
        for steps in (4, 10):
            for scheduler in (peer, ours):
                scheduler.set_timesteps(steps)
            assert worker.submit(lambda: ours.timesteps.tolist()).result() == peer.timesteps.tolist()
            for t in peer.timesteps[:2]:
                more = {"eta": 0.5} if class_name in ("DDIMScheduler", "TCDScheduler") else {}
                want = peer.step(network(start(), t), t, start(), generator=seeded(t), **more).prev_sample
                call = partial(ours.step, network(start(), t), t, start(), generator=seeded(t), **more)
                close(worker.submit(call).result().prev_sample, want)
            assert ours.step_index is None  # the other thread's run is its own


def test_a_run_of_all_training_times_ends_with_set_timesteps_in_another_thread() -> None:
    peer, ours = both("DDPMScheduler", **SD)
    euler = Scheduler.from_config({"_class_name": "EulerDiscreteScheduler", **SD})
    with ThreadPoolExecutor(1) as worker:
        for scheduler in (peer, ours, euler):
            worker.submit(scheduler.step, start(), scheduler.timesteps[0], start()).result()
            scheduler.set_timesteps(4)
        t = peer.timesteps[0]
        want = peer.step(network(start(), t), t, start(), generator=seeded(t)).prev_sample
        got = worker.submit(ours.step, network(start(), t), t, start(), generator=seeded(t)).result()
        close(got.prev_sample, want)
        with pytest.raises(PellucidError, match="set_timesteps must be called first in this thread"):
            worker.submit(euler.step, start(), 999, start()).result()


@pytest.mark.parametrize("copying", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s)), copy.copy])
@pytest.mark.parametrize("stepped", [0, 3])
@pytest.mark.parametrize(
    "class_name",
    ["EulerDiscreteScheduler", "HeunDiscreteScheduler", "UniPCMultistepScheduler", "DDIMScheduler", "LCMScheduler"],
)
def test_a_copy_goes_on_with_the_run(class_name: str, stepped: int, copying: Any) -> None:
    """As diffusers' copies do, with times, place and history; the two are apart from there on."""
    peer, ours = both(class_name, **SD)
    made = []
    for scheduler in (peer, ours):
        scheduler.set_timesteps(5)
        x, times = start(), scheduler.timesteps
        for t in times[:stepped]:
            scheduler.scale_model_input(x, t)
            x = scheduler.step(network(x, t), t, x, **options_of(scheduler, t)).prev_sample
        copied = copying(scheduler)
        scheduler.set_timesteps(7)
        assert copied.timesteps.tolist() == times.tolist()
        for t in copied.timesteps[stepped:]:
            copied.scale_model_input(x, t)
            x = copied.step(network(x, t), t, x, **options_of(copied, t)).prev_sample
        made.append(x)
    close(made[1], made[0], 1e-4)


def test_a_copy_made_in_another_thread_has_no_run_here() -> None:
    """It refuses, and does not begin with all training times."""
    scheduler = Scheduler.from_config({"_class_name": "EulerDiscreteScheduler", **SD})
    scheduler.set_timesteps(5)
    with ThreadPoolExecutor(1) as worker:
        copied = worker.submit(copy.deepcopy, scheduler).result()
    with pytest.raises(PellucidError, match="set_timesteps must be called first"):
        copied.step(start(), scheduler.timesteps[0], start())


def test_other_samplers_set_their_times_where_they_run() -> None:
    """A second thread must not begin with all training times because the first one set its own."""
    for class_name in ("EulerDiscreteScheduler", "DPMSolverMultistepScheduler"):
        scheduler = Scheduler.from_config({"_class_name": class_name, **SD})
        assert len(scheduler.timesteps) == 1000
        scheduler.set_timesteps(4)
        seen: list[Any] = []

        def other(scheduler: Scheduler = scheduler, seen: list[Any] = seen) -> None:
            for call in (lambda: scheduler.timesteps, lambda: scheduler.step(start(), 999, start())):
                with pytest.raises(PellucidError, match="set_timesteps must be called first in this thread"):
                    call()
            seen.append("refused")

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen == ["refused"]


def test_rows_compiled_alone_may_be_let_go_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread empties the store just after this one has looked into it, or put its row there."""

    class Emptied(dict[Any, Any]):
        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            self.clear()
            return found

        def __setitem__(self, key: Any, value: Any) -> None:
            self.clear()

    scheduler = Scheduler.from_config({"_class_name": "DDIMScheduler", **SD})
    scheduler.set_timesteps(8)
    want = scheduler.step(start(), 417, start()).prev_sample
    monkeypatch.setattr(scheduler, "_singles", Emptied(scheduler._singles))
    for _ in range(2):
        assert torch.equal(scheduler.step(start(), 417, start()).prev_sample, want)


def test_many_threads_on_one_scheduler() -> None:
    """Each thread has its own run, whatever the step counts."""
    scheduler = Scheduler.from_config({"_class_name": "UniPCMultistepScheduler", **SD})

    def walk(steps: int) -> Tensor:
        scheduler.set_timesteps(steps)
        x = start()
        for t in scheduler.timesteps:
            x = scheduler.step(network(x, t), t, x, return_dict=False)[0]
        return x

    want = [walk(n) for n in range(3, 11)]
    got: list[Any] = [None] * 8

    def work(i: int) -> None:
        for _ in range(10):
            got[i] = walk(i + 3)
            assert torch.equal(got[i], want[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("class_name", "config"),
    [
        ("EulerDiscreteScheduler", {"use_karras_sigmas": True}),
        ("HeunDiscreteScheduler", {}),
        ("LMSDiscreteScheduler", {"use_karras_sigmas": True}),
    ],
    ids=str,
)
def test_the_state_before_set_timesteps(class_name: str, config: dict[str, Any]) -> None:
    """diffusers' classes begin with every training time; they scale and step there."""
    peer, ours = both(class_name, **SD, **config)
    assert ours.timesteps.dtype == peer.timesteps.dtype
    t, s = peer.timesteps[-4], ours.timesteps[-4]
    close(ours.scale_model_input(start(), s), peer.scale_model_input(start(), t))
    close(ours.step(start(), s, start())[0], peer.step(start(), t, start())[0])


FLOW_LIKE = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler")
NO_TIMES = ("PNDMScheduler", "EDMEulerScheduler")  # diffusers: None, and one time more than there are


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("class_name", CLASSES)
def test_the_times_before_set_timesteps(class_name: str) -> None:
    """Training scripts read them; reading the sigmas changes nothing."""
    configs: list[dict[str, Any]] = [{}, {"num_train_timesteps": 400}]
    if class_name in FLOW_LIKE:
        configs += [{"shift": 3.0}]
    if class_name == "FlowMatchEulerDiscreteScheduler":
        configs += [{"shift": 3.0, "use_dynamic_shifting": True}, {"shift_terminal": 0.1}]
    if "use_karras_sigmas" in CLASSES[class_name][1] and class_name not in FLOW_LIKE:
        configs += [{"use_karras_sigmas": True}]
    if "use_flow_sigmas" in CLASSES[class_name][1]:
        configs += [{"use_flow_sigmas": True, "prediction_type": "flow_prediction", "num_train_timesteps": 400}]
    for config in configs:
        peer, ours = both(class_name, **config)
        if class_name in NO_TIMES:
            for call in (lambda ours=ours: ours.timesteps, lambda ours=ours: ours.sigmas):
                with pytest.raises(PellucidError, match="set_timesteps must be called first") as caught:
                    call()
                assert caught.value.code == "no-run"
            continue
        for _ in range(2):
            assert ours.timesteps.shape == peer.timesteps.shape
            rounded = "KDPM2" in class_name and "use_karras_sigmas" in config  # to whole times, some from the middle
            close(ours.timesteps.double(), peer.timesteps.double(), 1.1e-3 if rounded else 2e-5)
            assert ours.timesteps.dtype.is_floating_point == peer.timesteps.dtype.is_floating_point
            if class_name in FLOW_LIKE:
                close(ours.sigmas, peer.sigmas, 1e-6)
            elif not ours._scales_nothing:
                ours.sigmas  # noqa: B018
        assert ours.num_inference_steps is None


def test_the_times_of_a_video_model_before_set_timesteps() -> None:
    """Euler as Stable Video Diffusion sets it up: diffusers tells ¼·ln of sigmas that no run then has."""
    continuous = {"timestep_type": "continuous", "prediction_type": "v_prediction", "use_karras_sigmas": True}
    _, ours = both("EulerDiscreteScheduler", **SD, **continuous, sigma_min=0.002, sigma_max=700.0)
    with pytest.raises(PellucidError, match="set_timesteps must be called first"):
        ours.timesteps  # noqa: B018
    with pytest.raises(PellucidError, match="set_timesteps must be called first"):
        ours.step(start(), 1.6, start())


@pytest.mark.parametrize(
    "class_name",
    ["DPMSolverMultistepScheduler", "UniPCMultistepScheduler", "DEISMultistepScheduler", "SASolverScheduler"],
)
def test_a_solver_takes_its_last_step_for_a_foreign_time(class_name: str) -> None:
    """As diffusers does, but not in silence."""
    peer, ours = both(class_name, **SD)
    for scheduler in (peer, ours):
        scheduler.set_timesteps(8)
    want = peer.step(start() * 0.1, 3, start()).prev_sample
    with pytest.warns(UserWarning, match=r"timestep 3 is not in scheduler\.timesteps"):
        close(ours.step(start() * 0.1, 3, start()).prev_sample, want)


@pytest.mark.parametrize("begin", [1, 2, 3, 5])
@pytest.mark.parametrize("order", [2, 3])
def test_the_singlestep_solver_started_late(order: int, begin: int) -> None:
    """The orders stay those of the whole run, as far as there are outputs for them."""
    peer, ours = both("DPMSolverSinglestepScheduler", **SD, solver_order=order, lower_order_final=True)
    for scheduler in (peer, ours):
        scheduler.set_timesteps(9)
    x = y = start()
    for t in peer.timesteps[begin:]:
        x = peer.step(network(x, t), t, x).prev_sample
        y = ours.step(network(y, t), t, y).prev_sample
    close(y, x, 1e-4)


@pytest.mark.parametrize("begin", range(1, 8))
@pytest.mark.parametrize("class_name", ["DPMSolverSinglestepScheduler", "LMSDiscreteScheduler", "PNDMScheduler"])
def test_a_late_start_by_name_is_that_of_the_config(class_name: str, begin: int) -> None:
    """`pipe(sampler=..., dialect="diffusers", strength=...)` and a folder of that class run one table."""
    _, ours = both(class_name, **SD)
    ours.set_timesteps(8)
    ours.set_begin_index(begin)
    reading = ours.reading
    named = compile_plan(
        reading.sampler, schedule=reading.schedule, grid=reading.grid, steps=8, dialect="diffusers", skip=begin,
        **reading.options,
    )  # fmt: skip
    assert named == ours.plan


@pytest.mark.parametrize("target", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
@pytest.mark.parametrize("class_name", ["PNDMScheduler", "LMSDiscreteScheduler"])
def test_started_late_at_every_call(class_name: str, spacing: str, target: str) -> None:
    """PNDM counts its calls from 0 wherever it begins; LMS drops the weights of the outputs that it has not."""
    config = {**SD, "steps_offset": 1, "timestep_spacing": spacing, "prediction_type": target}
    config |= {"skip_prk_steps": True} if class_name == "PNDMScheduler" else {}
    for steps in (1, 2, 9):
        for begin in range(steps):
            peer, ours = both(class_name, **config)
            x = y = start()
            for scheduler in (peer, ours):
                scheduler.set_timesteps(steps)
                if hasattr(scheduler, "set_begin_index"):
                    scheduler.set_begin_index(begin)
            for t in peer.timesteps[begin:]:
                x = peer.step(network(peer.scale_model_input(x, t), t), t, x).prev_sample
                y = ours.step(network(ours.scale_model_input(y, t), t), t, y).prev_sample
            close(y, x, 2e-5)


@pytest.mark.parametrize(
    "class_name", ["KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler", "DPMSolverSDEScheduler"]
)
def test_noise_between_two_steps(class_name: str) -> None:
    """diffusers has no sigma of its own for a call between two steps: it takes that of the step to come."""
    peer, ours = both(class_name, **SD)
    for scheduler in (peer, ours):
        scheduler.set_timesteps(6)
    for t, s in zip(peer.timesteps, ours.timesteps, strict=True):
        close(ours.add_noise(start(), start().flip(0), s[None]), peer.add_noise(start(), start().flip(0), t[None]))


def test_some_pipelines_go_back_a_step() -> None:
    """Cosmos does, through `_step_index`."""
    peer, ours = both("EulerDiscreteScheduler", **SD)
    results = []
    for scheduler in (peer, ours):
        scheduler.set_timesteps(4)
        t = scheduler.timesteps[0]
        scheduler.scale_model_input(start(), t)
        scheduler.step(start(), t, start())
        scheduler._step_index -= 1
        results.append(scheduler.step(start(), t, start()).prev_sample)
    close(results[1], results[0])


# --- what step takes and returns -------------------------------------------------------------------------------


@pytest.mark.parametrize("class_name", CLASSES)
def test_step_takes_what_the_class_takes_in_its_order(class_name: str) -> None:
    names = list(inspect.signature(getattr(diffusers, class_name).step).parameters)[4:]
    assert STEP.get(class_name, ("return_dict",)) == tuple(names)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("class_name", CLASSES)
def test_the_output_is_as_diffusers_returns_it(class_name: str) -> None:
    config = {} if class_name.startswith(("FlowMatch", "IPNDM")) or class_name in EDM_LIKE else SD
    peer, ours = both(class_name, **config)
    made = []
    for scheduler, flat in ((peer, False), (ours, False), (peer, True), (ours, True)):
        scheduler.set_timesteps(12)
        t = scheduler.timesteps[0]
        if hasattr(scheduler, "scale_model_input"):
            scheduler.scale_model_input(start(), t)
        more = options_of(scheduler, t)
        made.append(scheduler.step(network(start(), t), t, start(), **more, **({"return_dict": False} if flat else {})))
    theirs, mine, their_tuple, my_tuple = made
    assert list(mine.keys()) == list(theirs.keys()) == list(mine)
    assert len(mine) == len(theirs) == len(my_tuple) == len(their_tuple)
    assert isinstance(my_tuple, tuple)
    # two classes draw from a Brownian tree, which we do not
    compared = list(theirs)[1:] if class_name.startswith(("DPMSolverSDE", "Cosine")) else list(theirs)
    for i, name in enumerate(theirs):
        values = (mine[name], mine[i], getattr(mine, name), list(mine.values())[i], dict(mine.items())[name])
        assert all(value is values[0] for value in (*values, mine.to_tuple()[i], mine[:][i]))
        if name in compared:
            close(values[0], theirs[name], 1e-4)
            close(my_tuple[i], their_tuple[i], 1e-4)
    with pytest.raises(KeyError):
        mine["denoise"]
    with pytest.raises(IndexError):
        mine[len(mine)]
    with pytest.raises(AttributeError):
        mine.prev  # noqa: B018


def test_arguments_by_position() -> None:
    """`step(out, t, x, generator)` of DDPM, `(…, eta, use_clipped, generator)` of DDIM, `(…, s_churn, …)` of Euler."""
    cases: list[tuple[str, tuple[Any, ...]]] = [
        ("DDPMScheduler", (seeded,)),
        ("DDIMScheduler", (0.7, True, seeded)),
        ("TCDScheduler", (0.4, seeded)),
        ("LCMScheduler", (seeded, False)),
        ("EulerDiscreteScheduler", (2.0, 0.0, 50.0, 1.1, seeded, True)),
        ("DPMSolverMultistepScheduler", (seeded, None, False)),
        ("PNDMScheduler", (False,)),
    ]
    for class_name, given in cases:
        results = []
        for scheduler in both(class_name, **SD):
            scheduler.set_timesteps(10)
            t = scheduler.timesteps[0]
            scheduler.scale_model_input(start(), t)
            values = [g(5) if g is seeded else g for g in given]
            results.append(scheduler.step(network(start(), t), t, start(), *values)[0])
        close(results[1], results[0])


@pytest.mark.parametrize("config", [{"clip_sample": True}, {"thresholding": True}, {"clip_sample": False}], ids=str)
def test_use_clipped_model_output(config: dict[str, Any]) -> None:
    peer, ours = both("DDIMScheduler", **SD, **config)
    x = y = start() * 2
    for scheduler in (peer, ours):
        scheduler.set_timesteps(5)
    for t in peer.timesteps:
        x = peer.step(network(x, t), t, x, use_clipped_model_output=True).prev_sample
        y = ours.step(network(y, t), t, y, use_clipped_model_output=True).prev_sample
    close(y, x)
    plain = ours.step(network(x, 800), 800, x).prev_sample
    clipped = ours.step(network(x, 800), 800, x, use_clipped_model_output=True).prev_sample
    assert torch.equal(plain, clipped) == (config == {"clip_sample": False})


@pytest.mark.parametrize(
    ("class_name", "config"),
    [
        ("EulerDiscreteScheduler", SD),
        ("EulerDiscreteScheduler", {**SD, "prediction_type": "v_prediction"}),
        ("EulerDiscreteScheduler", {**SD, "prediction_type": "sample", "final_sigmas_type": "sigma_min"}),
        ("EDMEulerScheduler", {}),
    ],
    ids=str,
)
def test_churn_equals_diffusers(class_name: str, config: dict[str, Any]) -> None:
    """diffusers puts the noise in after the model was asked; so do we where its class is asked for it."""
    peer, ours = both(class_name, **config)
    for scheduler in (peer, ours):
        scheduler.set_timesteps(6)
    x = y = start() * float(peer.init_noise_sigma)
    for t, t_ours in zip(peer.timesteps, ours.timesteps, strict=True):
        churn = {"s_churn": 3.0, "s_tmin": 0.05, "s_tmax": 60.0, "s_noise": 1.05}
        theirs = peer.step(network(peer.scale_model_input(x, t), t), t, x, **churn, generator=seeded(abs(t) * 99))
        out = network(ours.scale_model_input(y, t_ours), t)
        mine = ours.step(out, t_ours, y, **churn, generator=seeded(abs(t) * 99))
        close(mine.pred_original_sample, theirs.pred_original_sample, 1e-4)
        x, y = theirs.prev_sample, mine.prev_sample
    close(y, x, 1e-4)


@pytest.mark.parametrize(
    ("class_name", "given", "message"),
    [
        ("DDIMScheduler", {"s_churn": 1.0}, r"s_churn must be left out for ddim; got 1\.0"),
        ("EulerAncestralDiscreteScheduler", {"s_noise": 1.1}, r"s_noise must be left out for euler_a; got 1\.1"),
        ("FlowMatchEulerDiscreteScheduler", {"s_churn": 1.0}, "s_churn must be left out for flow_euler"),
        ("UniPCMultistepScheduler", {"use_clipped_model_output": True}, "must be False for unipc"),
        ("DDPMScheduler", {"etta": 1.0}, "etta must be left out for ddpm"),
    ],
)
def test_arguments_that_would_do_nothing_are_refused(class_name: str, given: dict[str, Any], message: str) -> None:
    scheduler = Scheduler.from_config({"_class_name": class_name})
    scheduler.set_timesteps(5)
    with pytest.raises(PellucidError, match=message):
        scheduler.step(start(), scheduler.timesteps[0], start(), **given)
    assert scheduler.step_index is None  # a refused step is no step


def test_too_many_arguments_by_position() -> None:
    scheduler = Scheduler.from_config({"_class_name": "PNDMScheduler", **SD})
    scheduler.set_timesteps(5)
    with pytest.raises(PellucidError, match="arguments must be return_dict after sample; got '2 of them'"):
        scheduler.step(start(), scheduler.timesteps[0], start(), seeded(1), False)


def test_s_noise_of_the_sde_solver() -> None:
    ours = Scheduler.from_config({"_class_name": "DPMSolverSDEScheduler", **SD})
    moved = []
    for scale in (0.0, 1.0, 2.0):
        ours.set_timesteps(4)
        t = ours.timesteps[0]
        moved.append(ours.step(start(), t, start(), s_noise=scale, generator=seeded(1)).prev_sample)
    assert not torch.equal(moved[0], moved[1])
    close(moved[2] - moved[0], 2 * (moved[1] - moved[0]), 1e-4)


def test_the_order_of_lms() -> None:
    peer, ours = both("LMSDiscreteScheduler", **SD)
    for scheduler in (peer, ours):
        scheduler.set_timesteps(7)
    x = y = start() * float(peer.init_noise_sigma)
    for t in peer.timesteps:
        x = peer.step(network(peer.scale_model_input(x, t), t), t, x, order=2).prev_sample
        y = ours.step(network(ours.scale_model_input(y, t), t), t, y, 2).prev_sample
    close(y, x, 1e-4)


@pytest.mark.parametrize("class_name", ["DDIMParallelScheduler", "DDPMParallelScheduler"])
def test_many_times_in_one_call(class_name: str) -> None:
    peer, ours = both(class_name, **SD)
    for scheduler in (peer, ours):
        scheduler.set_timesteps(10)
    times = peer.timesteps[torch.tensor([1, 4, 9])]
    x = start(shape=(3, 3, 4, 4))
    close(ours.batch_step_no_noise(x * 0.3, times, x), peer.batch_step_no_noise(x * 0.3, times, x))


# --- tables, PNDM's halves, previous times ---------------------------------------------------------------------

TABLES: list[tuple[str, dict[str, Any]]] = [
    ("DDPMScheduler", SD),
    ("DDIMScheduler", {**SD, "set_alpha_to_one": False}),
    ("DDIMScheduler", {**SD, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}),
    ("EulerDiscreteScheduler", {**SD, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}),
    ("PNDMScheduler", {**SD, "beta_schedule": "squaredcos_cap_v2"}),
    ("UniPCMultistepScheduler", {"trained_betas": [0.1, 0.2, 0.3]}),
    ("LCMScheduler", SD),
]


@pytest.mark.parametrize(("class_name", "config"), TABLES, ids=str)
def test_tables_equal_diffusers(class_name: str, config: dict[str, Any]) -> None:
    peer, ours = both(class_name, **config)
    for name in ("betas", "alphas", "alphas_cumprod", "final_alpha_cumprod"):
        if hasattr(peer, name):
            assert getattr(ours, name).dtype == torch.float32
            torch.testing.assert_close(getattr(ours, name), getattr(peer, name), rtol=5e-4, atol=1e-7)
    times = torch.tensor([0, 1])
    torch.testing.assert_close(compute_snr(ours, times), compute_snr(peer, times), rtol=1e-4, atol=0)
    ours.alphas_cumprod = ours.alphas_cumprod.to("cpu")  # scripts move it to their device
    with pytest.raises(PellucidError, match="alphas_cumprod must be the schedule's own"):
        ours.alphas_cumprod = ours.alphas_cumprod * 0.5


@pytest.mark.parametrize("class_name", ["EulerDiscreteScheduler", "HeunDiscreteScheduler", "DDIMScheduler"])
def test_the_first_scale_is_of_the_kind_that_diffusers_has(class_name: str) -> None:
    peer, ours = both(class_name, **SD)
    assert isinstance(ours.init_noise_sigma, Tensor) == isinstance(peer.init_noise_sigma, Tensor)
    assert (start() * ours.init_noise_sigma).dtype == torch.float32


def test_a_schedule_without_betas_has_no_tables() -> None:
    for class_name in ("FlowMatchEulerDiscreteScheduler", "EDMEulerScheduler"):
        assert not hasattr(Scheduler.from_config({"_class_name": class_name}), "alphas_cumprod")


@pytest.mark.parametrize("class_name", ["DDPMScheduler", "TCDScheduler"])
def test_previous_timestep(class_name: str) -> None:
    for setting in ({"num_inference_steps": 7}, {"timesteps": [100, 87, 50, 1, 0]}):
        peer, ours = both(class_name, **SD)
        for scheduler in (peer, ours):
            scheduler.set_timesteps(**setting)
        for t in peer.timesteps:
            assert ours.previous_timestep(t).item() == peer.previous_timestep(t).item()


def test_variance_equals_diffusers() -> None:
    peer, ours = both("DDIMScheduler")
    for t, before in ((420, 400), (980, 960), (0, -1), (999, 998)):
        torch.testing.assert_close(ours._get_variance(t, before), peer._get_variance(t, before), rtol=1e-4, atol=1e-8)
    for variance in ("fixed_small", "fixed_large"):
        peer, ours = both("DDPMScheduler", variance_type=variance)
        for t in (0, 487, 999):
            torch.testing.assert_close(ours._get_variance(t), peer._get_variance(t), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("skip", [True, False])
def test_pndm_in_two_halves(skip: bool) -> None:
    peer, ours = both("PNDMScheduler", **SD, skip_prk_steps=skip)
    results = []
    for scheduler in (peer, ours):
        scheduler.set_timesteps(10)
        x = start()
        for t in scheduler.prk_timesteps:
            x = scheduler.step_prk(network(x, t), int(t), x).prev_sample
        for t in scheduler.plms_timesteps:
            x = scheduler.step_plms(network(x, t), int(t), x, return_dict=False)[0]
        results.append(x)
    assert ours.prk_timesteps.tolist() == peer.prk_timesteps.tolist()
    assert ours.plms_timesteps.tolist() == peer.plms_timesteps.tolist()
    close(results[1], results[0])
    ours.set_timesteps(10)
    wrong = ours.step_prk if skip else ours.step_plms
    with pytest.raises(PellucidError, match="call must be step_"):
        wrong(start(), int(ours.timesteps[0]), start())


# --- configs, files, changes of class --------------------------------------------------------------------------

SD15 = {  # runwayml/stable-diffusion-v1-5, scheduler/scheduler_config.json
    "_class_name": "PNDMScheduler",
    "_diffusers_version": "0.6.0",
    **SD,
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "trained_betas": None,
    "clip_sample": False,
}


def test_the_config_keeps_every_key() -> None:
    """A key that PNDM does not read (`clip_sample`) is DDIM's when the class changes."""
    peer = diffusers.PNDMScheduler.from_config(SD15)
    ours = Scheduler.from_config(SD15)
    assert {k: v for k, v in ours.config.items() if k in SD15} == SD15
    assert set(ours.config["_use_default_values"]) == set(peer.config["_use_default_values"])
    for class_name in ("DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"):
        kind = getattr(diffusers, class_name)
        assert settings(kind.from_config(ours.config)) == settings(kind.from_config(peer.config))


def settings(scheduler: Any) -> dict[str, Any]:
    return {k: v for k, v in scheduler.config.items() if not k.startswith("_")}


@pytest.mark.parametrize("class_name", [name for name in INTERCHANGEABLE if not name.startswith("EDM")])
def test_a_change_of_class_leaves_defaults_behind(class_name: str) -> None:
    """SD 1.5's PNDM has `leading` by default; Euler, DPM++ and UniPC have `linspace`."""
    peer = diffusers.PNDMScheduler.from_config(SD15)
    theirs = getattr(diffusers, class_name).from_config(peer.config)
    ours = [
        Scheduler.from_config(peer, _class_name=class_name),
        Scheduler.from_config(Scheduler.from_config(peer), _class_name=class_name),
        class_named(class_name).from_config(Scheduler.from_config(SD15).config),
    ]
    want = settings(theirs)
    theirs.set_timesteps(7)
    for scheduler in ours:
        assert settings(scheduler) == want
        scheduler.set_timesteps(7)
        assert scheduler.timesteps.tolist() == pytest.approx(theirs.timesteps.tolist(), abs=2e-3)


@pytest.mark.parametrize("class_name", CLASSES)
def test_files_make_the_round_trip(class_name: str, tmp_path: Path) -> None:
    """diffusers writes, we read and write, diffusers reads: the config is what it was."""
    peer = getattr(diffusers, class_name)(**({"beta_end": 0.015} if "beta_end" in CLASSES[class_name][1] else {}))
    peer.save_pretrained(tmp_path / "theirs")
    ours = Scheduler.from_pretrained(tmp_path, subfolder="theirs")
    ours.save_pretrained(tmp_path / "ours")
    again = getattr(diffusers, class_name).from_pretrained(tmp_path / "ours")
    assert settings(again) == settings(peer)
    assert Scheduler.from_pretrained(tmp_path / "ours").config == ours.config
    assert Scheduler.load_config(tmp_path / "ours")["_class_name"] == class_name
    assert "_use_default_values" not in json.loads((tmp_path / "ours" / "scheduler_config.json").read_text("utf-8"))


def test_register_to_config() -> None:
    scheduler = Scheduler.from_config(SD15)
    scheduler.register_to_config(timestep_spacing="trailing", mine=5)
    assert scheduler.config.mine == 5
    scheduler.set_timesteps(4)
    assert scheduler.timesteps[0] == 999
    with pytest.warns(FutureWarning, match=r"scheduler\.config\.mine"):
        assert scheduler.mine == 5
    with pytest.raises(AttributeError, match="'Scheduler' object has no attribute 'yours'"):
        scheduler.yours  # noqa: B018


def test_compatible_classes() -> None:
    assert tuple(k.name for k in KarrasDiffusionSchedulers) == INTERCHANGEABLE
    offering = {name for name in CLASSES if getattr(diffusers, name)._compatibles}
    assert offering == OFFERS_CHANGE
    scheduler = Scheduler.from_config(SD15)
    assert [kind.__name__ for kind in scheduler.compatibles] == list(INTERCHANGEABLE)
    for kind in scheduler.compatibles:
        made = kind.from_config(scheduler.config)
        assert isinstance(made, Scheduler)
        assert made.config["_class_name"] == kind.__name__
    assert [k.__name__ for k in Scheduler.from_config({"_class_name": "LCMScheduler"}).compatibles] == ["LCMScheduler"]


def test_a_class_of_ours_takes_the_keywords_of_theirs() -> None:
    for name, (_, keys) in CLASSES.items():
        assert list(inspect.signature(class_named(name).__init__).parameters) == ["self", *keys]
    made = class_named("EulerDiscreteScheduler")(**SD, use_karras_sigmas=True)
    assert made.config.use_karras_sigmas is True
    assert "beta_end" not in made.config["_use_default_values"]


def test_diffusers_takes_ours_for_the_class_that_it_stands_for() -> None:
    """Its pipelines ask `isinstance`, and save by the class."""
    for scheduler in (Scheduler.from_config({"_class_name": "LMSDiscreteScheduler"}), Scheduler("lms")):
        assert isinstance(scheduler, diffusers.LMSDiscreteScheduler)
        assert isinstance(scheduler, diffusers.SchedulerMixin)
        assert isinstance(scheduler, Scheduler)
        assert type(scheduler) is Scheduler
    lacking = Scheduler("er_sde")  # diffusers has no such class: only the base
    assert isinstance(lacking, diffusers.SchedulerMixin)
    assert lacking.__class__ is Scheduler("er_sde").__class__ is not Scheduler


# --- settings that diffusers takes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("class_name", "setting"),
    [
        ("DDPMScheduler", {"timesteps": [900, 100]}),
        ("LCMScheduler", {"timesteps": [999, 499]}),
        ("EulerDiscreteScheduler", {"timesteps": [900, 100]}),
        ("EulerDiscreteScheduler", {"sigmas": [9.0, 1.0, 0.0]}),
        ("DPMSolverMultistepScheduler", {"timesteps": [900, 100]}),
    ],
    ids=str,
)
def test_steps_and_times_exclude_each_other(class_name: str, setting: dict[str, Any]) -> None:
    for scheduler in both(class_name, **SD):
        with pytest.raises(ValueError, match="num_inference_steps"):
            scheduler.set_timesteps(num_inference_steps=2, **setting)


@pytest.mark.parametrize("config", [{"sample_max_value": 0.5}, {"dynamic_thresholding_ratio": 0.0}], ids=str)
@pytest.mark.parametrize("class_name", ["DDIMScheduler", "DDPMScheduler", "DPMSolverMultistepScheduler"])
def test_thresholds_at_the_edge(class_name: str, config: dict[str, Any]) -> None:
    peer, ours = both(class_name, **SD, thresholding=True, **config)
    x = y = start() * 2
    for scheduler in (peer, ours):
        scheduler.set_timesteps(5)
    for t in peer.timesteps:
        x = peer.step(network(x, t), t, x, generator=seeded(t)).prev_sample
        y = ours.step(network(y, t), t, y, generator=seeded(t)).prev_sample
    close(y, x, 1e-4)


@pytest.mark.parametrize("class_name", ["DDPMScheduler", "DDIMScheduler", "DDIMInverseScheduler"])
def test_one_training_step(class_name: str) -> None:
    peer, ours = both(class_name, num_train_timesteps=1, clip_sample=False)
    for scheduler in (peer, ours):
        scheduler.set_timesteps(1)
    assert ours.timesteps.tolist() == peer.timesteps.tolist() == [0]
    close(ours.step(start() * 0.1, 0, start())[0], peer.step(start() * 0.1, 0, start())[0])
    image, noise, times = start(), start(4), torch.tensor([0])
    if hasattr(peer, "add_noise"):
        close(ours.add_noise(image, noise, times), peer.add_noise(image, noise, times))


@pytest.mark.parametrize(
    "class_name", ["DPMSolverMultistepScheduler", "UniPCMultistepScheduler", "DEISMultistepScheduler"]
)
def test_a_grid_that_repeats_a_time(class_name: str) -> None:
    """25 steps over 25 training times: rounding gives one of them twice. diffusers ends in NaN there; ours waits."""
    peer, ours = both(class_name, num_train_timesteps=25, solver_order=2)
    for scheduler in (peer, ours):
        scheduler.set_timesteps(25)
    assert ours.timesteps.tolist() == peer.timesteps.tolist()
    repeated = next(i for i in range(24) if peer.timesteps[i] == peer.timesteps[i + 1])
    x = y = start()
    for i, t in enumerate(peer.timesteps):
        x = peer.step(network(x, t), t, x).prev_sample
        y = ours.step(network(y, t), t, y).prev_sample
        if i < repeated:
            close(y, x, 1e-4)
    assert y.isfinite().all()
    assert float(y.abs().max()) < 10.0


def test_a_pipeline_with_a_sampler_that_diffusers_lacks_says_so_when_it_is_saved(tmp_path: Path) -> None:
    """It used to save itself without a scheduler."""
    network = diffusers.UNet2DModel(
        8,
        block_out_channels=(8,),
        norm_num_groups=8,
        layers_per_block=1,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    pipe = diffusers.DDPMPipeline(network, Scheduler("er_sde"))
    with pytest.raises(
        PellucidError, match=r"one that diffusers has, to export it; got 'er_sde'\. Nearest: dpmpp_sde"
    ) as caught:
        pipe.save_pretrained(tmp_path)
    assert caught.value.code == "export"
    assert not (tmp_path / "model_index.json").exists()
    assert isinstance(pipe.scheduler, Scheduler)
    pipe.scheduler = Scheduler("euler", dialect="diffusers", grid="linspace")
    pipe.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["scheduler"] == [
        "diffusers",
        "EulerDiscreteScheduler",
    ]


def test_arrays_in_a_config() -> None:
    """`trained_betas` as numpy, which is how scripts pass them."""
    made = class_named("DDIMScheduler")(trained_betas=np.array([0.1, 0.3]))
    assert made.config.trained_betas == [0.1, 0.3]
    with pytest.raises(PellucidError, match="trained_betas must be None in IPNDMScheduler"):
        class_named("IPNDMScheduler")(trained_betas=np.array([0.1, 0.3]))


@pytest.mark.parametrize("first", [0, 2, 6])
def test_ipndm_started_late_keeps_x(first: int) -> None:
    """Only at the very start of the schedule is there nothing of the image in x."""
    theirs, ours = diffusers.IPNDMScheduler(), Scheduler.from_config({"_class_name": "IPNDMScheduler"})
    a = b = torch.linspace(-1, 1, 8).reshape(1, 1, 2, 4)
    for one in (theirs, ours):
        one.set_timesteps(10)
        one.set_begin_index(first)
    for time in theirs.timesteps[first:]:
        a = theirs.step(0.3 * a + 0.1, time, a).prev_sample
        b = ours.step(0.3 * b + 0.1, time, b).prev_sample
    torch.testing.assert_close(b, a, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*sde-dpmsolver:FutureWarning")
@pytest.mark.parametrize("steps", [1, 4, 20])
@pytest.mark.parametrize(
    ("class_name", "config", "given"),
    [
        ("EulerAncestralDiscreteScheduler", SD, {}),
        ("EulerDiscreteScheduler", SD, {}),
        ("EulerDiscreteScheduler", SD, {"s_churn": 2.0}),
        ("KDPM2AncestralDiscreteScheduler", SD, {}),
        ("DDIMScheduler", {**SD, "clip_sample": False}, {"eta": 0.5}),
        ("DDIMScheduler", {**SD, "clip_sample": False}, {}),
        ("DDPMScheduler", {**SD, "clip_sample": False}, {}),
        ("DDPMScheduler", {**SD, "clip_sample": False, "timestep_spacing": "trailing"}, {}),
        ("DDPMScheduler", {**SD, "clip_sample": False, "variance_type": "fixed_large"}, {}),
        ("DPMSolverMultistepScheduler", {**SD, "algorithm_type": "sde-dpmsolver++"}, {}),
        ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver", "final_sigmas_type": "sigma_min"}, {}),
        ("DPMSolverMultistepScheduler", SD, {}),
        ("DPMSolverSinglestepScheduler", {**SD, "algorithm_type": "sde-dpmsolver++"}, {}),
        ("EDMDPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}, {}),
        ("EDMEulerScheduler", {}, {"s_churn": 2.0}),
        ("SASolverScheduler", SD, {}),
        ("SASolverScheduler", {**SD, "use_karras_sigmas": True}, {}),
        ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}, {}),
        ("FlowMatchEulerDiscreteScheduler", {}, {}),
        ("LCMScheduler", {}, {}),
        ("TCDScheduler", {}, {}),
        ("TCDScheduler", {}, {"eta": 0.0}),
    ],
)  # fmt: skip
def test_the_generator_is_where_diffusers_leaves_it(
    class_name: str, config: dict[str, Any], given: dict[str, Any], steps: int
) -> None:
    """diffusers draws noise also where its weight is 0, in the last step most of all: the next image depends on it."""
    schedulers = both(class_name, **config)
    generators = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for _ in range(2):
        made = [
            walk_from(one, generator, steps, **given) for one, generator in zip(schedulers, generators, strict=True)
        ]
        close(made[1], made[0], 5e-5)  # float32 from a sigma of 80 in one step: 2.1e-5
        assert torch.equal(generators[0].get_state(), generators[1].get_state())


def walk_from(scheduler: Any, generator: torch.Generator, steps: int, **given: Any) -> Tensor:
    """One image from a generator, as a pipeline makes it."""
    scheduler.set_timesteps(steps)
    x = torch.randn((2, 3, 4, 4), generator=generator) * getattr(scheduler, "init_noise_sigma", 1.0)
    for t in scheduler.timesteps:
        shown = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        x = scheduler.step(network(shown, t), t, x, generator=generator, **given).prev_sample
    return x
