"""diffusers scheduler configs ↔ (schedule, target, sampler, grid, options, x0 filter).

Each class is a row of CLASSES: the sampler, and the keys that it reads with their defaults. A key that another
class knows is inert here and becomes a note; a key that nobody knows, or a value that is not supported, is an
error that names it.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid.core import schedule as schedules
from pellucid.core import target as targets
from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError, PlanError, nearest, rule
from pellucid.core.filters import Clip, DynamicThreshold, Filter
from pellucid.core.grid import Grid
from pellucid.core.samplers import resolve
from pellucid.core.schedule import EDM, Flow, Schedule, Tabled

MAX_CONFIG_BYTES = 4 * 2**20
FILE_NAME = "scheduler_config.json"

BETAS = {
    "num_train_timesteps": 1000,
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "trained_betas": None,
}
SD_BETAS = {**BETAS, "beta_start": 0.00085, "beta_end": 0.012}
SCALED = {**SD_BETAS, "beta_schedule": "scaled_linear"}
RULES = {"use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False}
SPACED = {"timestep_spacing": "linspace", "steps_offset": 0}
LEADING = {"timestep_spacing": "leading", "steps_offset": 0}
CLIPS = {"clip_sample": True, "clip_sample_range": 1.0}
THRESHOLDS = {"thresholding": False, "dynamic_thresholding_ratio": 0.995, "sample_max_value": 1.0}
EPS = {"prediction_type": "epsilon"}
ZERO_SNR = {"rescale_betas_zero_snr": False}
FLOWS = {
    "use_flow_sigmas": False,
    "flow_shift": 1.0,
    "use_dynamic_shifting": False,
    "time_shift_type": "exponential",
}
SOLVER = {
    "solver_order": 2,
    "algorithm_type": "dpmsolver++",
    "solver_type": "midpoint",
    "lambda_min_clipped": -math.inf,
    "variance_type": None,
}
EDM_KEYS = {
    "sigma_min": 0.002,
    "sigma_max": 80.0,
    "sigma_data": 0.5,
    "sigma_schedule": "karras",
    "num_train_timesteps": 1000,
    "rho": 7.0,
    "final_sigmas_type": "zero",
}
DISTILLED = {
    **SCALED,
    "original_inference_steps": 50,
    **CLIPS,
    "clip_sample": False,
    "set_alpha_to_one": True,
    **LEADING,
    **EPS,
    **THRESHOLDS,
    "timestep_scaling": 10.0,
    **ZERO_SNR,
}
DDIM = {**BETAS, **CLIPS, "set_alpha_to_one": True, **LEADING, **EPS, **THRESHOLDS, **ZERO_SNR}
DDPM = {**BETAS, "variance_type": "fixed_small", **CLIPS, **EPS, **THRESHOLDS, **LEADING, **ZERO_SNR}

# class → (sampler, keys that it knows and their defaults)
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "DDIMScheduler": ("ddim", DDIM),
    "DDIMParallelScheduler": ("ddim", DDIM),
    "DDPMScheduler": ("ddpm", DDPM),
    "DDPMParallelScheduler": ("ddpm", DDPM),
    "DDIMInverseScheduler": (
        "ddim_inversion",
        {**BETAS, **CLIPS, "set_alpha_to_one": True, **LEADING, **EPS, **ZERO_SNR},
    ),
    "PNDMScheduler": ("pndm", {**BETAS, "skip_prk_steps": False, "set_alpha_to_one": False, **EPS, **LEADING}),
    "EulerDiscreteScheduler": (
        "euler",
        {
            **BETAS,
            **EPS,
            "interpolation_type": "linear",
            **RULES,
            "sigma_min": None,
            "sigma_max": None,
            **SPACED,
            "timestep_type": "discrete",
            **ZERO_SNR,
            "final_sigmas_type": "zero",
        },
    ),
    "EulerAncestralDiscreteScheduler": ("euler_a", {**BETAS, **EPS, **SPACED, **ZERO_SNR}),
    "HeunDiscreteScheduler": ("heun", {**SD_BETAS, **EPS, **RULES, **CLIPS, "clip_sample": False, **SPACED}),
    "LMSDiscreteScheduler": ("lms", {**BETAS, **RULES, **EPS, **SPACED}),
    "KDPM2DiscreteScheduler": ("dpm2", {**SD_BETAS, **RULES, **EPS, **SPACED}),
    "KDPM2AncestralDiscreteScheduler": ("dpm2_a", {**SD_BETAS, **RULES, **EPS, **SPACED}),
    "DPMSolverSDEScheduler": ("dpmpp_sde", {**SD_BETAS, **EPS, **RULES, "noise_sampler_seed": None, **SPACED}),
    "DPMSolverMultistepScheduler": (
        "dpm_multistep",
        {
            **BETAS,
            **SOLVER,
            **EPS,
            **THRESHOLDS,
            "lower_order_final": True,
            "euler_at_final": False,
            **RULES,
            "use_lu_lambdas": False,
            **FLOWS,
            "final_sigmas_type": "zero",
            **SPACED,
            **ZERO_SNR,
        },
    ),
    "DPMSolverSinglestepScheduler": (
        "dpm_singlestep",
        {
            **BETAS,
            **SOLVER,
            **EPS,
            **THRESHOLDS,
            "lower_order_final": False,
            **RULES,
            **FLOWS,
            "final_sigmas_type": "zero",
        },
    ),
    "UniPCMultistepScheduler": (
        "unipc",
        {
            **BETAS,
            "solver_order": 2,
            **EPS,
            **THRESHOLDS,
            "predict_x0": True,
            "solver_type": "bh2",
            "lower_order_final": True,
            "disable_corrector": [],
            "solver_p": None,
            **RULES,
            **FLOWS,
            **SPACED,
            "final_sigmas_type": "zero",
            **ZERO_SNR,
            "sigma_min": None,
            "sigma_max": None,
            "shift_terminal": None,
        },
    ),
    "DEISMultistepScheduler": (
        "deis",
        {
            **BETAS,
            "solver_order": 2,
            **EPS,
            **THRESHOLDS,
            "algorithm_type": "deis",
            "solver_type": "logrho",
            "lower_order_final": True,
            **RULES,
            **FLOWS,
            **SPACED,
        },
    ),
    "SASolverScheduler": (
        "sa_solver",
        {
            **BETAS,
            "predictor_order": 2,
            "corrector_order": 2,
            **EPS,
            "tau_func": None,
            **THRESHOLDS,
            "algorithm_type": "data_prediction",
            "lower_order_final": True,
            **RULES,
            "use_flow_sigmas": False,
            "flow_shift": 1.0,
            "lambda_min_clipped": -math.inf,
            "variance_type": None,
            **SPACED,
        },
    ),
    "LCMScheduler": ("lcm", DISTILLED),
    "TCDScheduler": ("tcd", DISTILLED),
    "IPNDMScheduler": ("ipndm", {"num_train_timesteps": 1000, "trained_betas": None}),
    "FlowMatchEulerDiscreteScheduler": (
        "flow_euler",
        {
            "num_train_timesteps": 1000,
            "shift": 1.0,
            "use_dynamic_shifting": False,
            "base_shift": 0.5,
            "max_shift": 1.15,
            "base_image_seq_len": 256,
            "max_image_seq_len": 4096,
            "invert_sigmas": False,
            "shift_terminal": None,
            **RULES,
            "time_shift_type": "exponential",
            "stochastic_sampling": False,
        },
    ),
    "FlowMatchHeunDiscreteScheduler": ("flow_heun", {"num_train_timesteps": 1000, "shift": 1.0}),
    "EDMEulerScheduler": ("euler", {**EDM_KEYS, **EPS}),
    "EDMDPMSolverMultistepScheduler": (
        "dpm_multistep",
        {
            **EDM_KEYS,
            **EPS,
            "solver_order": 2,
            **THRESHOLDS,
            "algorithm_type": "dpmsolver++",
            "solver_type": "midpoint",
            "lower_order_final": True,
            "euler_at_final": False,
        },
    ),
    "CosineDPMSolverMultistepScheduler": (
        "dpm_multistep",
        {
            **EDM_KEYS,
            "sigma_min": 0.3,
            "sigma_max": 500,
            "sigma_data": 1.0,
            "sigma_schedule": "exponential",
            "prediction_type": "v_prediction",
            "solver_order": 2,
            "solver_type": "midpoint",
            "lower_order_final": True,
            "euler_at_final": False,
        },
    ),
}

# Keys of classes that are not imported here; in another class's config they change nothing.
ELSEWHERE = {
    "set_alpha_to_zero",
    "predict_epsilon",
    "snr_shift_scale",
    "s_noise",
    "s_churn",
    "s_min",
    "s_max",
    "sampling_eps",
    "correct_steps",
    "snr",
    "skip_type",
    "num_inference_steps",
    "prk_timesteps",
    "tensor_format",
    "beta_max",
    "beta_min",
    "scaler",
    "variance_noise",
    "original_sample",
    "clip_sample_value",
}
KNOWN = {key for _, keys in CLASSES.values() for key in keys} | ELSEWHERE


@dataclass(frozen=True)
class Reading:
    """A config, understood."""

    class_name: str
    sampler: str
    schedule: Schedule
    target: str
    grid: Grid
    options: dict[str, Any]
    x0_filter: Filter | None = None
    values: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def load(source: Any) -> dict[str, Any]:
    """A config dict from a dict, a JSON file, a folder that holds one, a live `.config`, or a live scheduler."""
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, (str, os.PathLike)):
        return read_file(Path(source))
    config = getattr(source, "config", None)
    if isinstance(config, Mapping):
        return {**config, "_class_name": config.get("_class_name", type(source).__name__)}
    raise PellucidError(rule("config", "a dict, a file, a folder or a scheduler", type(source).__name__), "config")


def read_file(path: Path) -> dict[str, Any]:
    places = [path / FILE_NAME, path / "scheduler" / FILE_NAME] if path.is_dir() else [path]
    found = next((p for p in places if p.is_file()), None)
    if found is None:
        raise PellucidError(rule("config", f"a {FILE_NAME} or a folder that holds one", str(path)), "config-file")
    if found.stat().st_size > MAX_CONFIG_BYTES:
        raise PellucidError(rule("config", f"at most {MAX_CONFIG_BYTES} bytes", found.stat().st_size), "config-file")
    try:
        data = json.loads(found.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PellucidError(f"config must be JSON; {found.name} is not: {error}.", "config-file") from None
    if not isinstance(data, dict):
        raise PellucidError(rule("config", "a JSON object", type(data).__name__), "config-file")
    return data


def class_of(config: dict[str, Any]) -> str:
    """The class that a config names, or the only one whose keys it has."""
    name = config.get("_class_name")
    if name is None:
        keys = {k for k in config if not k.startswith("_")}
        fitting = [c for c, (_, known) in CLASSES.items() if set(known) == keys and "Parallel" not in c]
        if len(fitting) == 1:
            return fitting[0]
        raise PellucidError(
            rule(
                "_class_name",
                "in the config",
                None,
                f"Fits: {', '.join(fitting) or 'no class'}. Pass the scheduler itself.",
            ),
            "config-class",
        )
    if name not in CLASSES:
        raise PellucidError(
            rule("_class_name", "a class that Pellucid reads", name, nearest(str(name), CLASSES)),
            "config-class",
        )
    return str(name)


def read(source: Any, strict: bool = True) -> Reading:
    """Understands a config, or says which key stands in the way."""
    config = load(source)
    name = class_of(config)
    sampler, known = CLASSES[name]
    notes, problems = [], []
    for key, value in config.items():
        if key.startswith("_") or key in known:
            continue
        if key in KNOWN:
            notes.append(f"{key}={value!r} has no effect in {name}")
        else:
            problems.append(
                f"{key} must be a key that some diffusers scheduler knows; got {value!r}. {nearest(key, KNOWN)}"
            )
    values = {k: config.get(k, default) for k, default in known.items()}
    problems += unsupported(name, values)
    if problems and strict:
        raise PellucidError(" ".join(problems) + " Pass strict=False to go on without.", "config-key")
    for problem in problems:
        warnings.warn(problem, stacklevel=3)
    kind = (
        "flow" if name.startswith("FlowMatch") or values.get("use_flow_sigmas") else values.get("prediction_type", "v")
    )
    return Reading(
        class_name=name,
        sampler="plms" if values.get("skip_prk_steps") else sampler,
        schedule=schedule_of(name, values),
        target=target_of(name, kind, values),
        grid=grid_of(name, values),
        options=options_of(name, values),
        x0_filter=filter_of(values),
        values=values,
        notes=tuple(notes),
    )


def unsupported(name: str, v: dict[str, Any]) -> list[str]:
    """Keys that would change the result and are not supported."""
    checks = {
        "interpolation_type": ("linear",),
        "lambda_min_clipped": (-math.inf, "-inf", "-Infinity"),
        "invert_sigmas": (False, None),
        "solver_p": (None,),
        "tau_func": (None,),
    }
    found = [
        f"{key} must be {allowed[0]!r} in {name}; got {v[key]!r}, which is not supported."
        for key, allowed in checks.items()
        if key in v and v[key] not in allowed
    ]
    if name.startswith("DDPM") and v["variance_type"] in ("learned", "learned_range"):
        found.append(
            f"variance_type must be fixed in {name}; got {v['variance_type']!r}. "
            "Sampling with a learned variance is refused."
        )
    if name.startswith("EDM") and v["prediction_type"] not in ("epsilon", "v_prediction"):
        found.append(f"prediction_type must be epsilon or v_prediction in {name}; got {v['prediction_type']!r}.")
    if name.startswith("EDM") and v["prediction_type"] == "v_prediction" and v["sigma_data"] != 1.0:
        found.append(f"sigma_data must be 1.0 for v_prediction in {name}; got {v['sigma_data']!r}.")
    if edm_like(v) and not (v["use_karras_sigmas"] and v["sigma_min"] and v["sigma_max"]):
        found.append(
            f"timestep_type must be discrete in {name} without karras sigmas and their ends; got 'continuous'."
        )
    if v.get("use_flow_sigmas") and any(v.get(k) for k in (*RULES, "use_lu_lambdas")):
        found.append(f"use_flow_sigmas must stand without another sigma rule in {name}; got both.")
    if v.get("use_flow_sigmas") and v.get("final_sigmas_type") == "sigma_min":
        found.append(f"final_sigmas_type must be 'zero' with use_flow_sigmas in {name}; got 'sigma_min'.")
    if v.get("shift_terminal") and not (v.get("use_flow_sigmas") or name.startswith("FlowMatch")):
        found.append(f"shift_terminal must go with use_flow_sigmas in {name}; got {v['shift_terminal']!r}.")
    return found


BETA_SCHEDULES = {
    "linear": schedules.linear,
    "scaled_linear": schedules.scaled_linear,
    "sigmoid": schedules.sigmoid,
}
CURVES = {"squaredcos_cap_v2": schedules.cosine, "exp": schedules.exponential, "laplace": schedules.laplace}


def edm_like(v: dict[str, Any]) -> bool:
    """Stable Video Diffusion's set-up: a v model told ¼·ln sigma, on karras sigmas of its own range."""
    return v.get("timestep_type") == "continuous" and v["prediction_type"] == "v_prediction"


def schedule_of(name: str, v: dict[str, Any]) -> Schedule:
    if edm_like(v):
        return EDM(float(v["sigma_min"]), float(v["sigma_max"]), 1.0)
    if name == "IPNDMScheduler":
        return schedules.vp_cosine(u_min=1e-9)
    if "sigma_schedule" in v:
        told = "atan" if name.startswith("Cosine") else "log"
        return EDM(float(v["sigma_min"]), float(v["sigma_max"]), float(v["sigma_data"]), told)  # type: ignore[arg-type]
    if name.startswith("FlowMatch") or v.get("use_flow_sigmas"):
        count = int(v["num_train_timesteps"])
        shift = float(v.get("shift", v.get("flow_shift", 1.0)))
        return Flow(
            1.0 if v.get("use_dynamic_shifting") else shift,
            float(count),
            v.get("shift_terminal"),
            1.0 / count,
        )
    if v["trained_betas"] is not None:
        made: Tabled = schedules.trained(v["trained_betas"])
    elif v["beta_schedule"] in BETA_SCHEDULES:
        made = BETA_SCHEDULES[v["beta_schedule"]](
            int(v["num_train_timesteps"]), float(v["beta_start"]), float(v["beta_end"])
        )
    elif v["beta_schedule"] in CURVES:
        made = CURVES[v["beta_schedule"]](int(v["num_train_timesteps"]))
    else:
        known = [*BETA_SCHEDULES, *CURVES]
        raise PellucidError(rule("beta_schedule", "one of " + ", ".join(known), v["beta_schedule"]), "config-key")
    return schedules.zero_terminal_snr(made) if v.get("rescale_betas_zero_snr") else made


def target_of(name: str, kind: str, v: dict[str, Any]) -> str:
    if "sigma_schedule" in v:
        return "v" if kind == "v_prediction" else "edm"
    return targets.named(kind)


def grid_of(name: str, v: dict[str, Any]) -> Grid:
    rules = {
        "use_karras_sigmas": "karras",
        "use_exponential_sigmas": "exponential",
        "use_beta_sigmas": "beta",
        "use_lu_lambdas": "lu",
    }
    chosen = [rule_name for key, rule_name in rules.items() if v.get(key)]
    if len(chosen) > 1:
        raise PellucidError(
            rule("sigma rule", "one of use_karras_sigmas, use_exponential_sigmas, use_beta_sigmas", chosen),
            "config-key",
        )
    spacing = v.get("timestep_spacing")
    final = v.get("final_sigmas_type", "zero" if v.get("set_alpha_to_one", True) else "sigma_min")
    if name in ("DEISMultistepScheduler", "SASolverScheduler"):
        final = "sigma_min"
    if "sigma_schedule" in v:
        return Grid(str(v["sigma_schedule"]), final=final, rho=float(v["rho"]))
    original = int(v.get("original_inference_steps", 50))
    return Grid(
        chosen[0] if chosen else spacing or "linspace",
        final=final,
        spacing=spacing,
        offset=float(v.get("steps_offset") or 0),
        sigma_min=v.get("sigma_min"),
        sigma_max=v.get("sigma_max"),
        original=original,
    )


def options_of(name: str, v: dict[str, Any]) -> dict[str, Any]:
    """The sampler's options that a config sets."""
    if name.startswith("DDPM"):
        return {"variance": "large" if "large" in str(v["variance_type"]) else "small"}
    if name == "LCMScheduler":
        return {"timestep_scaling": float(v["timestep_scaling"])}
    if name == "FlowMatchEulerDiscreteScheduler":
        return {"stochastic": bool(v["stochastic_sampling"])}
    if name == "UniPCMultistepScheduler":
        variant = v["solver_type"] if v["solver_type"] in ("bh1", "bh2") else "bh2"
        return {
            "order": int(v["solver_order"]),
            "variant": variant,
            "predict_x0": bool(v["predict_x0"]),
            "lower_order_final": bool(v["lower_order_final"]),
            "disable_corrector": tuple(v["disable_corrector"] or ()),
        }
    if name == "DEISMultistepScheduler":
        return {"order": int(v["solver_order"]), "lower_order_final": bool(v["lower_order_final"])}
    if name == "SASolverScheduler":
        return {
            "predictor_order": int(v["predictor_order"]),
            "corrector_order": int(v["corrector_order"]),
            "predict_x0": v["algorithm_type"] == "data_prediction",
            "lower_order_final": bool(v["lower_order_final"]),
        }
    if "solver_order" in v:
        return solver_options(name, v)
    return {}


def solver_options(name: str, v: dict[str, Any]) -> dict[str, Any]:
    algorithm = "sde-dpmsolver++" if name.startswith("Cosine") else v["algorithm_type"]
    algorithm = "dpmsolver++" if algorithm == "deis" else algorithm
    solver = "midpoint" if v["solver_type"] in ("logrho", "bh1", "bh2") else v["solver_type"]
    out = {"order": int(v["solver_order"]), "algorithm": algorithm, "solver": solver}
    if name != "DPMSolverSinglestepScheduler":
        out |= {
            "lower_order_final": bool(v["lower_order_final"]),
            "euler_at_final": bool(v["euler_at_final"]),
        }
    return out


def filter_of(v: dict[str, Any]) -> Filter | None:
    if v.get("thresholding"):
        return DynamicThreshold(float(v["dynamic_thresholding_ratio"]), float(v["sample_max_value"]))
    if v.get("clip_sample"):
        return Clip(float(v["clip_sample_range"]))
    return None


# --- export ----------------------------------------------------------------------------------------------------

EXPORTS = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "ddim_inversion": "DDIMInverseScheduler",
    "plms": "PNDMScheduler",
    "pndm": "PNDMScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_a": "EulerAncestralDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "lms": "LMSDiscreteScheduler",
    "dpm2": "KDPM2DiscreteScheduler",
    "dpm2_a": "KDPM2AncestralDiscreteScheduler",
    "dpmpp_sde": "DPMSolverSDEScheduler",
    "dpm_multistep": "DPMSolverMultistepScheduler",
    "dpmpp_2m": "DPMSolverMultistepScheduler",
    "dpmpp_3m": "DPMSolverMultistepScheduler",
    "dpmpp_2m_sde": "DPMSolverMultistepScheduler",
    "dpmpp_3m_sde": "DPMSolverMultistepScheduler",
    "dpm_singlestep": "DPMSolverSinglestepScheduler",
    "unipc": "UniPCMultistepScheduler",
    "deis": "DEISMultistepScheduler",
    "sa_solver": "SASolverScheduler",
    "lcm": "LCMScheduler",
    "tcd": "TCDScheduler",
    "ipndm": "IPNDMScheduler",
    "flow_euler": "FlowMatchEulerDiscreteScheduler",
    "flow_heun": "FlowMatchHeunDiscreteScheduler",
}
PRESETS: dict[str, dict[str, Any]] = {
    "plms": {"skip_prk_steps": True},
    "dpmpp_3m": {"solver_order": 3},
    "dpmpp_2m_sde": {"algorithm_type": "sde-dpmsolver++"},
    "dpmpp_3m_sde": {"solver_order": 3, "algorithm_type": "sde-dpmsolver++", "solver_type": "heun"},
}
SAME = {k: k for k in ("lower_order_final", "euler_at_final", "predict_x0", "disable_corrector", "timestep_scaling")}
SOLVER_KEYS = {**SAME, "order": "solver_order", "algorithm": "algorithm_type", "solver": "solver_type"}
# our option → the key that says it; an option that is not here stays at its default or is not exported
OPTION_KEYS: dict[str, dict[str, str]] = {
    "ddpm": {"variance": "variance_type"},
    "flow_euler": {"stochastic": "stochastic_sampling"},
    "unipc": {**SOLVER_KEYS, "variant": "solver_type"},
    "sa_solver": {
        **SAME,
        "predict_x0": "algorithm_type",
        "predictor_order": "predictor_order",
        "corrector_order": "corrector_order",
    },
}
TARGET_NAMES = {"eps": "epsilon", "x0": "sample", "v": "v_prediction", "flow": "flow_prediction"}
RULE_KEYS = {
    "karras": "use_karras_sigmas",
    "exponential": "use_exponential_sigmas",
    "beta": "use_beta_sigmas",
    "lu": "use_lu_lambdas",
}


def write(reading: Reading) -> dict[str, Any]:
    """The config of the diffusers class that computes what our diffusers dialect computes.

    What came from a config goes back unchanged. What no config can say is refused, not left out.
    """
    if reading.values:
        return {"_class_name": reading.class_name, **{k: jsonable(x) for k, x in reading.values.items()}}
    name, keys = export_class(reading)
    try:
        compile_plan(
            reading.sampler,
            schedule=reading.schedule,
            target=reading.target,
            grid=reading.grid,
            steps=None if reading.grid.name == "explicit" else 4,
            dialect="diffusers",
            **reading.options,
        )
    except PlanError as error:
        raise PellucidError(f"The scheduler must be one that {name} can be; {error}", "export") from None
    values = {
        **keys,
        **PRESETS.get(reading.sampler, {}),
        **option_keys(reading, name),
        **grid_keys(reading, name, keys),
        **filter_keys(reading.x0_filter, name, keys),
        **target_keys(reading, name, keys),
    }
    values |= schedule_keys(reading.schedule, name, values)
    if values.get("algorithm_type") in ("dpmsolver", "sde-dpmsolver") and values["final_sigmas_type"] == "zero":
        raise refusal("final", f"sigma_min for {values['algorithm_type']} in {name}", "zero")
    return {"_class_name": name, **{k: jsonable(x) for k, x in values.items()}}


def describe(reading: Reading) -> dict[str, Any]:
    """What pipelines read of a sampler that was named and not read: its export, or its schedule and target.

    Without the keys that Stable Diffusion's pipelines rewrite: they are a choice here, not an old config.
    """
    try:
        found = write(reading)
    except PellucidError:
        found = {"_class_name": "Scheduler", "prediction_type": TARGET_NAMES.get(reading.target, reading.target)}
        found["num_train_timesteps"] = reading.schedule.num_train or 1000
        if isinstance(reading.schedule, Tabled):
            found |= schedule_keys(reading.schedule, "DDIMScheduler", DDIM)
    rewritten = {"steps_offset", "skip_prk_steps"} | ({"clip_sample"} if found.get("clip_sample") else set())
    return {k: x for k, x in found.items() if k not in rewritten}


def refusal(name: str, must: str, got: object) -> PellucidError:
    return PellucidError(rule(name, must, got, "No diffusers config says this."), "export")


def export_class(reading: Reading) -> tuple[str, dict[str, Any]]:
    name = EXPORTS.get(reading.sampler)
    if isinstance(reading.schedule, EDM):
        name = {
            "euler": "EDMEulerScheduler",
            "dpm_multistep": "EDMDPMSolverMultistepScheduler",
            "dpmpp_2m": "EDMDPMSolverMultistepScheduler",
        }.get(reading.sampler)
    if name is None:
        raise PellucidError(
            rule(
                "sampler",
                "one that diffusers has, to export it",
                reading.sampler,
                nearest(reading.sampler, EXPORTS),
            ),
            "export",
        )
    return name, CLASSES[name][1]


def option_keys(reading: Reading, name: str) -> dict[str, Any]:
    """The sampler's options as keys; those without a key must have the value that the class has."""
    mapped = OPTION_KEYS.get(reading.sampler, SOLVER_KEYS)
    out: dict[str, Any] = {}
    for option, default in resolve(reading.sampler)[0].options().items():
        value = reading.options.get(option, default)
        if mapped.get(option) in CLASSES[name][1]:
            out[mapped[option]] = value
        elif value != default:
            raise refusal(option, f"{default!r} in {name}", value)
    if "lower_order_final" not in reading.options:
        out.pop("lower_order_final", None)  # the dialect follows the class where nothing is said
    if name.startswith("DDPM"):
        out["variance_type"] = f"fixed_{out['variance_type']}"
    if name == "SASolverScheduler":
        out["algorithm_type"] = "data_prediction" if out["algorithm_type"] else "noise_prediction"
    return out


def grid_keys(reading: Reading, name: str, keys: dict[str, Any]) -> dict[str, Any]:
    grid, out = reading.grid, {}
    edm = isinstance(reading.schedule, EDM)
    if grid.name == "explicit" or grid.start is not None:
        raise refusal("grid", "a named one over the whole schedule", grid.to_dict())
    if grid.rho not in (None, 7.0) and not edm:
        raise refusal("rho", f"7 in {name}", grid.rho)
    if edm:
        out = {"sigma_schedule": grid.name, "rho": 7.0 if grid.rho is None else grid.rho}
    elif grid.name in RULE_KEYS:
        if RULE_KEYS[grid.name] not in keys:
            raise refusal("grid", f"one that {name} has", grid.name)
        out[RULE_KEYS[grid.name]] = True
    spacing = grid.name if grid.name in ("leading", "linspace", "trailing") else grid.spacing
    parts = {
        "timestep_spacing": (spacing or keys.get("timestep_spacing"), spacing),
        "steps_offset": (int(grid.offset), 0 if grid.offset == int(grid.offset) else grid.offset),
        "original_inference_steps": (grid.original, grid.original),
        "sigma_min": (grid.sigma_min, None),
        "sigma_max": (grid.sigma_max, None),
        "final_sigmas_type": (grid.final, grid.final),
        "set_alpha_to_one": (grid.final == "zero", grid.final),
    }
    out |= {key: said for key, (said, _) in parts.items() if key in keys and not (edm and key.startswith("sigma"))}
    lost = {"offset": grid.offset if "steps_offset" not in keys else parts["steps_offset"][1]}
    lost |= {k: getattr(grid, k) for k in ("sigma_min", "sigma_max") if k not in keys or edm}
    fixed_end = name in ("DEISMultistepScheduler", "SASolverScheduler")
    if not fixed_end and not {"final_sigmas_type", "set_alpha_to_one"} & set(keys) and grid.final != "zero":
        lost["final"] = grid.final
    for field_name, value in lost.items():
        if value:
            raise refusal(field_name, f"left out in {name}", value)
    return out


def filter_keys(x0_filter: Filter | None, name: str, keys: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {k: False for k in ("clip_sample", "thresholding") if k in keys}
    if isinstance(x0_filter, Clip) and "clip_sample" in keys:
        return {**out, "clip_sample": True, "clip_sample_range": x0_filter.limit}
    if isinstance(x0_filter, DynamicThreshold) and "thresholding" in keys:
        ratio, most = x0_filter.quantile, x0_filter.most
        return {**out, "thresholding": True, "dynamic_thresholding_ratio": ratio, "sample_max_value": most}
    if x0_filter is not None:
        raise refusal("x0_filter", f"one that {name} has", x0_filter)
    return out


def target_keys(reading: Reading, name: str, keys: dict[str, Any]) -> dict[str, Any]:
    spelled = TARGET_NAMES.get(reading.target, reading.target)
    if isinstance(reading.schedule, EDM):  # the class calls the preconditioned F "epsilon"
        spelled = {"edm": "epsilon", "v": "v_prediction"}.get(reading.target, "")
    if "prediction_type" not in keys:
        only = "flow" if name.startswith("FlowMatch") else "v"
        if reading.target != only:
            raise refusal("target", f"{only} in {name}", reading.target)
        return {}
    if spelled not in TARGET_NAMES.values():
        raise refusal("target", f"one that {name} has", reading.target)
    return {"prediction_type": spelled}


def schedule_keys(curve: Schedule, name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The keys of a schedule: by its name where that gives the same numbers again, else its betas."""
    if name == "IPNDMScheduler":  # has a schedule of its own
        return {}
    if isinstance(curve, EDM):
        if curve.c_noise != "log":
            raise refusal("c_noise", f"log in {name}", curve.c_noise)
        return {k: getattr(curve, k) for k in ("sigma_min", "sigma_max", "sigma_data")}
    if isinstance(curve, Flow):
        own = "shift" if "shift" in values else "flow_shift"
        out: dict[str, Any] = {own: curve.shift, "num_train_timesteps": int(curve.scale)}
        if own == "flow_shift":
            out["use_flow_sigmas"] = True
        if "shift_terminal" in values:
            out["shift_terminal"] = curve.terminal
    else:
        assert isinstance(curve, Tabled)  # the dialect takes no other
        made = dict(curve.made_with)
        back = {"cosine": "squaredcos_cap_v2", "exponential": "exp"}
        out = {
            "num_train_timesteps": curve.num_train,
            "beta_schedule": back.get(curve.kind, curve.kind),
            **{k: made[k] for k in ("beta_start", "beta_end") if k in made},
        }
        if curve.zero_terminal:
            out["rescale_betas_zero_snr"] = True
    everywhere = ("linear", "scaled_linear", "squaredcos_cap_v2", None)  # the names that every class knows
    named = out.get("beta_schedule") in everywhere
    if named and set(out) <= set(values) and says(curve, name, {**values, **out}):
        return out
    if isinstance(curve, Tabled) and not curve.zero_terminal:
        return {"num_train_timesteps": curve.num_train, "trained_betas": curve.betas.tolist()}
    raise refusal("schedule", f"one that {name} has", curve)


def says(curve: Schedule, name: str, values: dict[str, Any]) -> bool:
    """Whether these keys give this schedule again."""
    try:
        again = schedule_of(name, values)
    except PellucidError:
        return False
    if isinstance(curve, Tabled) and isinstance(again, Tabled):
        return curve.num_train == again.num_train and bool(abs(curve.betas - again.betas).max() < 1e-12)
    return curve == again


def jsonable(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value
