"""diffusers scheduler configs: read, understood or refused, and written back so that diffusers agrees."""

from __future__ import annotations

import inspect
import json
import math
import os
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers
from published import CONFIGS
from torch import Tensor

from pellucid import Clip, DynamicThreshold, Grid, PellucidError, Scheduler, samplers, schedules
from pellucid.interop import diffusers_config as configs
from pellucid.interop import diffusers_export
from pellucid.interop.diffusers_plan import compile_reading, noise_notes

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


V = {"prediction_type": "v_prediction"}
FLOW = {"use_flow_sigmas": True}
THRESHOLD = {"thresholding": True}


def network(x: Tensor, time: Any) -> Tensor:
    return (0.6 * torch.sin(1.3 * x + 0.002 * float(time)) + 0.3 * x).to(x.dtype)


def start() -> Tensor:
    return torch.randn((2, 3, 4, 4), generator=torch.Generator().manual_seed(3))


def walk(scheduler: Any, steps: int | None, **setting: Any) -> Tensor:
    """A run as a pipeline does it, with the caller's generator, in float32."""
    scheduler.set_timesteps(steps, **setting)
    generator = torch.Generator().manual_seed(1)
    x = start() * float(getattr(scheduler, "init_noise_sigma", 1.0))
    for t in scheduler.timesteps:
        shown = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        takes = "generator" in inspect.signature(scheduler.step).parameters
        x = scheduler.step(network(shown, t), t, x, **({"generator": generator} if takes else {})).prev_sample
    return x


def apart(a: Tensor, b: Tensor) -> float:
    assert b.isfinite().all()
    return float((a - b).abs().max() / b.abs().max())


# float32 on both sides, and diffusers multiplies a thousand alphas in it: 1e-5 a step
CLOSE = 2e-4

# --- where a config may come from ------------------------------------------------------------------------------


def test_every_source_gives_the_same(tmp_path: Path) -> None:
    peer = diffusers.UniPCMultistepScheduler(**SD, solver_order=3)
    data = {"_class_name": "UniPCMultistepScheduler", **SD, "solver_order": 3}
    peer.save_pretrained(tmp_path / "plain")
    peer.save_pretrained(tmp_path / "model" / "scheduler")
    file = tmp_path / "anything.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    sources = [data, file, str(file), tmp_path / "plain", tmp_path / "model", peer, peer.config]
    readings = [Scheduler.from_config(source).reading for source in sources]
    assert len({tuple(sorted((k, repr(v)) for k, v in r.values.items())) for r in readings}) == 1
    assert {r.sampler for r in readings} == {"unipc"}
    assert {r.options["order"] for r in readings} == {3}
    for scheduler in (
        Scheduler.from_pretrained(tmp_path / "plain"),
        Scheduler.from_pretrained(tmp_path / "model", subfolder="scheduler"),
        Scheduler.from_config(Scheduler.from_config(data)),
        Scheduler.from_config(Scheduler.from_config(data).config),
    ):
        assert scheduler.reading.values == readings[0].values


def test_a_live_config_carries_its_class() -> None:
    """diffusers' own `.config` names no class in old versions; the one that fits alone is taken."""
    config = dict(diffusers.UniPCMultistepScheduler(**SD).config)
    nameless = {k: v for k, v in config.items() if not k.startswith("_")}
    assert Scheduler.from_config(nameless).reading.class_name == "UniPCMultistepScheduler"
    with pytest.raises(PellucidError, match="_class_name must be in the config"):
        Scheduler.from_config(SD)


def test_overrides_replace_keys() -> None:
    scheduler = Scheduler.from_config({"_class_name": "EulerDiscreteScheduler", **SD}, use_karras_sigmas=True)
    assert scheduler.reading.grid.name == "karras"


@pytest.mark.parametrize("source", [3, None, ["a"], object()])
def test_no_config_at_all(source: Any) -> None:
    with pytest.raises(PellucidError, match="config must be a dict, a file, a folder or a scheduler"):
        Scheduler.from_config(source)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", r"scheduler_config\.json must be JSON"),
        (b"\xff\xfe\x00", r"scheduler_config\.json must be text in UTF-8"),
        (b"[1, 2]", r"scheduler_config\.json must be a JSON object; got \[1, 2\]"),
        (b" " * (configs.MAX_CONFIG_BYTES + 1), r"scheduler_config\.json must be at most 4194304 bytes"),
    ],
)
def test_broken_files(text: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / configs.FILE_NAME).write_bytes(text)
    with pytest.raises(PellucidError, match=message) as caught:
        Scheduler.from_config(tmp_path)
    assert caught.value.code == "config-file"


@pytest.mark.parametrize("where", ["", "missing.json", "sub"])
def test_missing_files(where: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    with pytest.raises(PellucidError, match=r"a scheduler_config\.json or a folder that holds one"):
        Scheduler.from_config(tmp_path / where)


# --- published configs -----------------------------------------------------------------------------------------

# By name: the keys that the class does not read, and what a run is told.
PUBLISHED: dict[str, tuple[set[str], dict[str, Any]]] = {
    "stable-diffusion-v1-5": ({"clip_sample"}, {}),
    "stable-diffusion-2-1": ({"skip_prk_steps"}, {}),
    "stable-diffusion-2-1 with PNDM": ({"clip_sample"}, {}),
    "stable-diffusion-xl-base-1.0": ({"clip_sample", "sample_max_value", "set_alpha_to_one", "skip_prk_steps"}, {}),
    "sdxl-turbo": (
        {"clip_sample", "interpolation_type", "sample_max_value", "set_alpha_to_one", "skip_prk_steps"}, {}
    ),
    "stable-diffusion-3": (set(), {}),
    "FLUX.1-dev": (set(), {"mu": 0.85}),
    "FLUX.1-schnell": (set(), {}),
}  # fmt: skip


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_configs_give_diffusers_result(model: str, tmp_path: Path) -> None:
    config, (notes, setting) = CONFIGS[model], PUBLISHED[model]
    (tmp_path / configs.FILE_NAME).write_text(json.dumps(config), encoding="utf-8")
    ours = Scheduler.from_config(tmp_path)
    assert {note.split("=")[0] for note in ours.notes} == notes
    assert all(f"has no effect in {config['_class_name']}" in note for note in ours.notes)
    peer = getattr(diffusers, config["_class_name"]).from_pretrained(tmp_path)
    for steps in (4, 20):
        want, got = walk(peer, steps, **setting), walk(ours, steps, **setting)
        assert apart(got, want) < CLOSE
        assert apart(walk(ours, steps // 2, **setting), want) > 1e-3


def test_flux_as_its_pipeline_calls_it() -> None:
    """FluxPipeline passes its own sigmas and the mu of the image's size."""
    config = CONFIGS["FLUX.1-dev"]
    peer, ours = diffusers.FlowMatchEulerDiscreteScheduler.from_config(config), Scheduler.from_config(config)
    sigmas = torch.linspace(1.0, 1 / 8, 8).numpy()
    assert apart(walk(ours, None, sigmas=sigmas, mu=1.15), walk(peer, None, sigmas=sigmas, mu=1.15)) < CLOSE
    with pytest.raises(PellucidError, match="mu must be given with use_dynamic_shifting"):
        ours.set_timesteps(8)


# --- keys ------------------------------------------------------------------------------------------------------


def test_an_unknown_key_is_named_with_its_nearest() -> None:
    config = {"_class_name": "EulerDiscreteScheduler", **SD, "use_karas_sigmas": True}
    with pytest.raises(
        PellucidError, match="use_karas_sigmas must be a key that some diffusers scheduler knows"
    ) as caught:
        Scheduler.from_config(config)
    assert "use_karras_sigmas" in str(caught.value)
    assert caught.value.code == "config-key"
    with pytest.warns(UserWarning, match="use_karas_sigmas must be a key") as seen:
        scheduler = Scheduler.from_config(config, strict=False)
    assert len(seen) == 1
    assert scheduler.reading.grid.name == "linspace"


def test_private_keys_are_left_alone() -> None:
    config = {"_class_name": "DDIMScheduler", "_diffusers_version": "9", "_use_default_values": ["x"], **SD}
    assert Scheduler.from_config(config).notes == ()


@pytest.mark.parametrize(
    ("class_name", "values", "named"),
    [
        ("DDPMScheduler", {"variance_type": "learned"}, "variance_type must be fixed"),
        ("DDPMScheduler", {"variance_type": "learned_range"}, "variance_type must be fixed"),
        ("FlowMatchEulerDiscreteScheduler", {"invert_sigmas": True}, "invert_sigmas must be False"),
        ("DPMSolverMultistepScheduler", {"lambda_min_clipped": -5.1}, "lambda_min_clipped must be -inf"),
        ("DPMSolverSinglestepScheduler", {"lambda_min_clipped": -5.1}, "lambda_min_clipped must be -inf"),
        ("UniPCMultistepScheduler", {"solver_p": {"a": 1}}, "solver_p must be None"),
        ("SASolverScheduler", {"tau_func": "f"}, "tau_func must be None"),
        ("EulerDiscreteScheduler", {"interpolation_type": "log_linear"}, "interpolation_type must be 'linear'"),
        ("EulerDiscreteScheduler", {"timestep_type": "continuous", **V}, "timestep_type must be discrete"),
        ("EulerDiscreteScheduler", {"beta_schedule": "wavy"}, "beta_schedule must be one of"),
        ("EulerDiscreteScheduler", {"prediction_type": "sunshine"}, "target must be one of"),
        ("EulerDiscreteScheduler", {"use_karras_sigmas": True, "use_beta_sigmas": True}, "sigma rule must be one of"),
        ("UniPCMultistepScheduler", {**FLOW, "use_karras_sigmas": True}, "stand without another sigma rule"),
        ("UniPCMultistepScheduler", {**FLOW, "final_sigmas_type": "sigma_min"}, "final_sigmas_type must be 'zero'"),
        ("UniPCMultistepScheduler", {"shift_terminal": 0.1}, "shift_terminal must go with use_flow_sigmas"),
        ("EDMEulerScheduler", V, "sigma_data must be 1.0"),
        ("DDIMScheduler", {"timestep_spacing": "zigzag"}, "grid must be a known name"),
    ],
)  # fmt: skip
def test_values_that_are_not_supported_are_named(class_name: str, values: dict[str, Any], named: str) -> None:
    with pytest.raises(PellucidError, match=named):
        Scheduler.from_config({"_class_name": class_name, **values}).set_timesteps(4)


@pytest.mark.parametrize("name", ["EulerScheduler", "VQDiffusionScheduler", "FlaxDDIMScheduler"])
def test_a_class_that_is_not_read(name: str) -> None:
    with pytest.raises(PellucidError, match="_class_name must be a class that Pellucid reads") as caught:
        Scheduler.from_config({"_class_name": name})
    assert "Nearest: " in str(caught.value)


def signature(class_name: str) -> dict[str, Any]:
    parameters = inspect.signature(getattr(diffusers, class_name).__init__).parameters
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {k: p.default for k, p in parameters.items() if k != "self" and p.kind in named}


@pytest.mark.parametrize("class_name", configs.CLASSES)
def test_keys_and_defaults_are_those_of_diffusers(class_name: str) -> None:
    """The table of classes cannot drift from the installed diffusers."""
    ours = configs.CLASSES[class_name][1]
    theirs = signature(class_name)
    assert set(ours) == set(theirs)
    wrong = {
        k: (ours[k], theirs[k]) for k in ours if ours[k] != theirs[k] or type(ours[k]) is bool is not type(theirs[k])
    }
    assert not wrong


def test_the_karras_family_is_read_whole() -> None:
    """Every class that diffusers calls interchangeable is one that we read, and its keys are known in any config."""
    family = {member.name for member in KarrasDiffusionSchedulers}
    assert len(family) >= 14
    assert family <= set(configs.CLASSES)
    for name in family:
        assert set(signature(name)) <= configs.KNOWN


def test_every_class_names_a_sampler_and_defaults_compile() -> None:
    for class_name, (sampler, _) in configs.CLASSES.items():
        assert sampler in samplers.names(), class_name
        scheduler = Scheduler.from_config({"_class_name": class_name})
        scheduler.set_timesteps(5)
        assert scheduler.plan.dialect == "diffusers"


# --- filters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize(
    ("class_name", "values", "kind"),
    [
        ("DDIMScheduler", {"clip_sample": True, "clip_sample_range": 0.7}, Clip(0.7)),
        ("DDIMScheduler", {**THRESHOLD, "dynamic_thresholding_ratio": 0.8}, DynamicThreshold(0.8)),
        ("DDPMScheduler", {"clip_sample": True}, Clip(1.0)),
        ("DDPMScheduler", {"thresholding": True, "sample_max_value": 1.5}, DynamicThreshold(0.995, 1.5)),
        ("DPMSolverMultistepScheduler", {**THRESHOLD, "dynamic_thresholding_ratio": 0.9}, DynamicThreshold(0.9)),
        ("UniPCMultistepScheduler", {"thresholding": True, "sample_max_value": 2.0}, DynamicThreshold(0.995, 2.0)),
        ("DPMSolverSinglestepScheduler", {"thresholding": True}, DynamicThreshold()),
        ("LCMScheduler", {"clip_sample": True, "clip_sample_range": 0.5}, Clip(0.5)),
    ],
)  # fmt: skip
def test_clipping_and_thresholding_become_filters(
    class_name: str, values: dict[str, Any], kind: Any, prediction: str
) -> None:
    config = {**SD, **values, "prediction_type": prediction}
    peer = getattr(diffusers, class_name)(**config)
    ours = Scheduler.from_config(peer)
    assert ours.reading.x0_filter == kind
    want = walk(peer, 6)
    assert apart(walk(ours, 6), want) < CLOSE
    without = {k: False for k in ("clip_sample", "thresholding") if k in configs.CLASSES[class_name][1]}
    assert apart(walk(Scheduler.from_config(peer, **without), 6), want) > 1e-3  # the filter does something


def test_heun_clips_too() -> None:
    peer = diffusers.HeunDiscreteScheduler(**SD, clip_sample=True, clip_sample_range=0.8)
    assert apart(walk(Scheduler.from_config(peer), 6), walk(peer, 6)) < CLOSE


# --- export ----------------------------------------------------------------------------------------------------

VARIED: list[tuple[str, dict[str, Any]]] = [
    ("DDIMScheduler", {"set_alpha_to_one": False, "steps_offset": 1, "clip_sample": False}),
    ("DDPMScheduler", {"variance_type": "fixed_large", "thresholding": True}),
    ("PNDMScheduler", {"skip_prk_steps": True, "prediction_type": "v_prediction"}),
    ("EulerDiscreteScheduler", {"use_karras_sigmas": True, "sigma_min": 0.1, "final_sigmas_type": "sigma_min"}),
    ("EulerAncestralDiscreteScheduler", {"timestep_spacing": "trailing"}),
    ("HeunDiscreteScheduler", {"use_exponential_sigmas": True}),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True}),
    ("DPMSolverMultistepScheduler", {"solver_order": 3, "euler_at_final": True, "solver_type": "heun"}),
    ("UniPCMultistepScheduler", {"disable_corrector": [0, 1], "solver_order": 3}),
    ("DEISMultistepScheduler", {"solver_order": 3, "use_beta_sigmas": True}),
    ("SASolverScheduler", {"predictor_order": 3, "algorithm_type": "noise_prediction"}),
    ("LCMScheduler", {"original_inference_steps": 25, "timestep_scaling": 8.0}),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 2.5, "stochastic_sampling": True}),
    ("EDMDPMSolverMultistepScheduler", {"sigma_max": 20.0, "rho": 5.0, "lower_order_final": False}),
]  # fmt: skip


@pytest.mark.parametrize("class_name", configs.CLASSES)
def test_a_config_comes_back_with_the_same_values(class_name: str) -> None:
    peer = getattr(diffusers, class_name)()
    exported = Scheduler.from_config(peer).export()
    again = getattr(diffusers, class_name).from_config(exported)
    assert {k: v for k, v in again.config.items() if not k.startswith("_")} == {
        k: v for k, v in peer.config.items() if not k.startswith("_")
    }


@pytest.mark.parametrize(("class_name", "values"), VARIED)
def test_a_varied_config_comes_back_and_runs_the_same(class_name: str, values: dict[str, Any], tmp_path: Path) -> None:
    betas = SD if "beta_start" in configs.CLASSES[class_name][1] else {}
    peer = getattr(diffusers, class_name)(**betas, **values)
    ours = Scheduler.from_config(peer)
    ours.save_pretrained(tmp_path)
    again = getattr(diffusers, class_name).from_pretrained(tmp_path)
    for key, value in {**betas, **values}.items():
        assert again.config[key] == value
    want = walk(again, 6)
    assert apart(walk(ours, 6), want) < CLOSE
    assert apart(walk(Scheduler.from_pretrained(tmp_path), 6), want) < CLOSE


ZERO_SNR = schedules.make("scaled_linear", zero_snr=True)
NATIVE: list[tuple[str, dict[str, Any]]] = [
    ("ddim", {}),
    ("ddim", {"grid": Grid("leading", offset=1.0, final="sigma_min"), "schedule": "linear"}),
    ("ddim", {"grid": "trailing", "x0_filter": Clip(0.6)}),
    ("ddim", {"schedule": ZERO_SNR, "target": "v"}),
    ("ddim", {"schedule": schedules.trained([0.001 * (i + 1) for i in range(50)])}),
    ("ddim", {"schedule": schedules.cosine(500), "target": "x0"}),
    ("ddim", {"schedule": schedules.cosine(1000, offset=0.02)}),
    ("ddpm", {"variance": "large"}),
    ("ddpm", {"x0_filter": DynamicThreshold(0.9, 1.5)}),
    ("plms", {"grid": "leading"}),
    ("pndm", {"grid": "leading", "target": "v"}),
    ("euler", {"grid": "karras"}),
    ("euler", {"grid": Grid("karras", sigma_min=0.1, sigma_max=10.0)}),
    ("euler", {"grid": Grid("trailing", final="sigma_min"), "target": "v"}),
    ("euler", {"schedule": "edm", "target": "edm"}),
    ("euler_a", {"grid": "trailing"}),
    ("heun", {"grid": "linspace", "schedule": schedules.sigmoid(1000, 0.00085, 0.02)}),
    ("heun", {"grid": "exponential", "schedule": "scaled_linear"}),
    ("lms", {"grid": "beta"}),
    ("dpm2", {}),
    ("dpm2_a", {}),
    ("dpm_multistep", {"order": 3, "solver": "heun", "lower_order_final": False}),
    ("dpm_multistep", {"algorithm": "sde-dpmsolver++", "grid": "karras"}),
    ("dpm_multistep", {"algorithm": "dpmsolver", "grid": Grid("linspace", final="sigma_min")}),
    ("dpm_multistep", {"schedule": "edm", "target": "edm", "euler_at_final": True}),
    ("dpm_multistep", {"schedule": schedules.flow(shift=2.0), "target": "flow"}),
    ("dpm_multistep", {"schedule": "flow", "target": "flow", "order": 3, "lower_order_final": False}),
    ("dpm_multistep", {"schedule": "flow", "target": "flow", "order": 3, "algorithm": "sde-dpmsolver++"}),
    ("dpm_multistep", {"schedule": "edm", "target": "edm", "order": 3, "lower_order_final": False}),
    ("dpmpp_2m", {"grid": "karras"}),
    ("dpmpp_2m", {"grid": "lu", "solver": "heun"}),
    ("dpmpp_3m", {}),
    ("dpmpp_2m_sde", {"grid": "karras"}),
    ("dpmpp_3m_sde", {}),
    ("dpm_singlestep", {"order": 3}),
    ("ddim_inversion", {}),
    ("unipc", {"order": 3, "disable_corrector": (0,)}),
    ("unipc", {"variant": "bh1", "grid": Grid("linspace", final="sigma_min"), "predict_x0": False}),
    ("unipc", {"schedule": schedules.flow(shift=3.0, terminal=0.1), "target": "flow"}),
    ("deis", {}),
    ("deis", {"order": 2, "grid": "karras"}),
    ("sa_solver", {"predictor_order": 3, "corrector_order": 3}),
    ("lcm", {"grid": Grid("lcm", original=25), "timestep_scaling": 5.0}),
    ("tcd", {}),
    ("ipndm", {"target": "v"}),
    ("flow_euler", {"schedule": schedules.flow(shift=3.0), "target": "flow"}),
    ("flow_euler", {"schedule": "flow", "target": "flow", "stochastic": True}),
    ("flow_heun", {"schedule": schedules.flow(shift=1.5), "target": "flow"}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*dpmsolver.*deprecated:FutureWarning")
@pytest.mark.parametrize(("name", "setup"), NATIVE, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_a_named_sampler_exports_to_a_class_with_its_result(name: str, setup: dict[str, Any]) -> None:
    """diffusers loads what we export, and computes what our diffusers dialect computes."""
    ours = Scheduler(name, dialect="diffusers", **setup)
    exported = ours.export()
    peer_class = getattr(diffusers, exported["_class_name"])
    assert set(exported) - {"_class_name"} == set(signature(exported["_class_name"]))
    peer = peer_class.from_config(json.loads(json.dumps(exported)))
    for steps in (5, 16):
        want = walk(peer, steps)
        assert apart(walk(ours, steps), want) < CLOSE, steps
        assert apart(walk(Scheduler.from_config(exported), steps), want) < CLOSE, steps


def test_the_exact_dialect_exports_the_same() -> None:
    for dialect in ("exact", "diffusers"):
        exported = Scheduler("dpmpp_2m", grid="karras", dialect=dialect).export()
        assert exported["_class_name"] == "DPMSolverMultistepScheduler"
        assert exported["use_karras_sigmas"] is True


def test_every_sampler_exports_or_says_why_not() -> None:
    """Those that diffusers has are all in the list above."""
    tried = {name for name, _ in NATIVE}
    assert set(diffusers_export.EXPORTS) - tried == {"dpmpp_sde"}  # diffusers' draws from a tree of its own
    refused = {"edm_stochastic", "euler_cfgpp", "dpmpp_2m_cfgpp"}  # by the three-call API itself
    for name in set(samplers.names()) - set(diffusers_export.EXPORTS) - refused:
        with pytest.raises(PellucidError, match="sampler must be one that diffusers has, to export it") as caught:
            Scheduler(name).export()
        assert caught.value.code == "export"


@pytest.mark.parametrize(
    ("name", "setup", "what"),
    [
        ("euler", {"grid": "kl_optimal"}, "grid must be one that diffusers has"),
        ("euler", {"grid": Grid("karras", rho=5.0)}, "rho must be 7"),
        ("euler", {"grid": Grid(timesteps=(900.0, 100.0))}, "grid must be a named one"),
        ("euler", {"grid": Grid("trailing", start=800.0)}, "grid must be a named one"),
        ("euler", {"s_noise": 1.01}, "s_noise must be 1.0"),
        ("euler", {"x0_filter": Clip()}, "x0_filter must be one that EulerDiscreteScheduler has"),
        ("euler", {"schedule": "vp_linear"}, "The scheduler must be one that EulerDiscreteScheduler can be"),
        ("euler", {"target": "score"}, "target must be one that EulerDiscreteScheduler has"),
        ("euler_a", {"eta": 0.5}, "eta must be 1.0"),
        ("euler_a", {"grid": "karras"}, "grid must be one that EulerAncestralDiscreteScheduler has"),
        ("ddim", {"eta": 0.5}, "eta must be 0.0"),
        ("ddim", {"grid": Grid("leading", offset=0.5)}, "offset must be left out"),
        ("heun", {"grid": Grid("karras", sigma_min=0.1)}, "sigma_min must be left out"),
        ("heun", {"grid": Grid("linspace", final="sigma_min")}, "final must be left out"),
        ("lms", {"schedule": ZERO_SNR, "target": "v", "dialect": "diffusers"}, "schedule must be one that LMSDiscrete"),
        ("lms", {"order": 3}, "order must be 4"),
        ("dpm_multistep", {"algorithm": "dpmsolver"}, "final must be sigma_min for dpmsolver"),
        ("dpmpp_2m_sde", {"eta": 0.3}, "eta must be 1.0"),
        ("sa_solver", {"tau": 0.5}, "tau must be 1.0"),
        ("ipndm", {"target": "x0"}, "target must be v in IPNDMScheduler"),
        ("heun", {"schedule": "edm", "target": "edm"}, "sampler must be one that diffusers has"),
        ("euler", {"schedule": schedules.EDM(c_noise="sigma"), "target": "edm"}, "c_noise must be log"),
        ("euler", {"schedule": "edm", "target": "x0"}, "target must be one that EDMEulerScheduler has"),
    ],
)  # fmt: skip
def test_what_no_config_can_say_is_refused(name: str, setup: dict[str, Any], what: str) -> None:
    """An export that would run differently is no export."""
    with pytest.raises(PellucidError, match=what):
        Scheduler(name, **setup).export()


def test_saving_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler.from_config({"_class_name": "DPMSolverMultistepScheduler", **SD})
    target = tmp_path / "deep" / "folder"
    scheduler.save_pretrained(target)
    assert [p.name for p in target.iterdir()] == [configs.FILE_NAME]
    before = (target / configs.FILE_NAME).read_text(encoding="utf-8")
    assert json.loads(before)["lambda_min_clipped"] == -math.inf
    assert oct(os.stat(target / configs.FILE_NAME).st_mode & 0o777) == oct(0o666 & ~current_umask())

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", broken)
    other = Scheduler.from_config({"_class_name": "DDIMScheduler", **SD})
    with pytest.raises(OSError, match="no space left"):
        other.save_pretrained(target)
    assert (target / configs.FILE_NAME).read_text(encoding="utf-8") == before
    assert [p.name for p in target.iterdir()] == [configs.FILE_NAME]  # and nothing half written is left behind


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_refused_export_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(PellucidError):
        Scheduler("er_sde").save_pretrained(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_config_reads_as_attributes_and_as_a_dict() -> None:
    config = Scheduler.from_config({"_class_name": "DDIMScheduler", **SD}).config
    assert config.beta_end == config["beta_end"] == 0.012
    assert getattr(config, "nothing", 5) == 5
    assert "beta_schedule" in config
    with pytest.raises(AttributeError):
        _ = config.nothing


@pytest.mark.parametrize("class_name", ["DPMSolverSDEScheduler", "CosineDPMSolverMultistepScheduler"])
def test_noise_that_only_diffusers_has_is_said(class_name: str) -> None:
    reading = configs.read({"_class_name": class_name})
    assert class_name in noise_notes(compile_reading(reading, 4), class_name)[0]
    assert noise_notes(compile_reading(reading, 4, dialect="exact"), class_name) == ()
    other = configs.read({"_class_name": "DPMSolverMultistepScheduler"})
    assert noise_notes(compile_reading(other, 4), "DPMSolverMultistepScheduler") == ()
