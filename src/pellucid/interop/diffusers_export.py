"""(schedule, target, sampler, grid, options, x0 filter) → the config of the diffusers class that computes the same."""

from __future__ import annotations

from typing import Any

from pellucid.core.compile import compile_plan
from pellucid.core.dialect_diffusers import SPACINGS
from pellucid.core.errors import PellucidError, PlanError, nearest, rule
from pellucid.core.filters import Clip, DynamicThreshold, Filter
from pellucid.core.samplers import resolve
from pellucid.core.schedule import EDM, DiscreteVP, Flow, Schedule
from pellucid.interop.diffusers_classes import CLASSES, DDIM
from pellucid.interop.diffusers_config import RULE_KEYS, SchedulerSettings, schedule_of

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
_PRESETS: dict[str, dict[str, Any]] = {
    "plms": {"skip_prk_steps": True},
    "dpmpp_3m": {"solver_order": 3},
    "dpmpp_2m_sde": {"algorithm_type": "sde-dpmsolver++"},
    "dpmpp_3m_sde": {"solver_order": 3, "algorithm_type": "sde-dpmsolver++", "solver_type": "heun"},
}
_SAME = {k: k for k in ("lower_order_final", "euler_at_final", "predict_x0", "disable_corrector", "timestep_scaling")}
_SOLVER_KEYS = {**_SAME, "order": "solver_order", "algorithm": "algorithm_type", "solver": "solver_type"}
# our option → the key that says it; an option that is not here stays at its default or is not exported
_OPTION_KEYS: dict[str, dict[str, str]] = {
    "ddpm": {"variance": "variance_type"},
    "flow_euler": {"stochastic": "stochastic_sampling"},
    "unipc": {**_SOLVER_KEYS, "variant": "solver_type"},
    "sa_solver": {
        **_SAME,
        "predict_x0": "algorithm_type",
        "predictor_order": "predictor_order",
        "corrector_order": "corrector_order",
    },
}
TARGET_NAMES = {"eps": "epsilon", "x0": "sample", "v": "v_prediction", "flow": "flow_prediction"}


def write(reading: SchedulerSettings) -> dict[str, Any]:
    """The config of the diffusers class that computes what our diffusers dialect computes.

    What came from a config goes back unchanged. What no config can say is refused, not left out.
    """
    if reading.values:
        kept = {**reading.extra, **reading.values}
        return {"_class_name": reading.class_name, **{k: _jsonable(x) for k, x in kept.items()}}
    name, keys = _export_class(reading)
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
        **_PRESETS.get(reading.sampler, {}),
        **_option_keys(reading, name),
        **_grid_keys(reading, name, keys),
        **_filter_keys(reading.x0_filter, name, keys),
        **_target_keys(reading, name, keys),
    }
    values |= _schedule_keys(reading.schedule, name, values)
    if values.get("algorithm_type") in ("dpmsolver", "sde-dpmsolver") and values["final_sigmas_type"] == "zero":
        raise _refusal("final", f"sigma_min for {values['algorithm_type']} in {name}", "zero")
    return {"_class_name": name, **{k: _jsonable(x) for k, x in values.items()}}


def describe(reading: SchedulerSettings) -> dict[str, Any]:
    """What pipelines read of a sampler that was named and not read: its export, or its schedule and target.

    Without the keys that Stable Diffusion's pipelines rewrite: they are a choice here, not an old config.
    """
    try:
        found = write(reading)
    except PellucidError:
        found = {"_class_name": "Scheduler", "prediction_type": TARGET_NAMES.get(reading.target, reading.target)}
        found["num_train_timesteps"] = reading.schedule.num_train or 1000
        if isinstance(reading.schedule, DiscreteVP):
            found |= _schedule_keys(reading.schedule, "DDIMScheduler", DDIM)
    rewritten = {"steps_offset", "skip_prk_steps"} | ({"clip_sample"} if found.get("clip_sample") else set())
    return {k: x for k, x in found.items() if k not in rewritten}


def _refusal(name: str, must: str, got: object) -> PellucidError:
    return PellucidError(rule(name, must, got, "No diffusers config says this."), "export")


def _export_class(reading: SchedulerSettings) -> tuple[str, dict[str, Any]]:
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


def _option_keys(reading: SchedulerSettings, name: str) -> dict[str, Any]:
    """The sampler's options as keys; those without a key must have the value that the class has."""
    mapped = _OPTION_KEYS.get(reading.sampler, _SOLVER_KEYS)
    out: dict[str, Any] = {}
    for option, default in resolve(reading.sampler)[0].options().items():
        value = reading.options.get(option, default)
        if mapped.get(option) in CLASSES[name][1]:
            out[mapped[option]] = value
        elif value != default:
            raise _refusal(option, f"{default!r} in {name}", value)
    if "lower_order_final" not in reading.options:
        out.pop("lower_order_final", None)  # the dialect follows the class where nothing is said
    if name.startswith("DDPM"):
        out["variance_type"] = f"fixed_{out['variance_type']}"
    if name == "SASolverScheduler":
        out["algorithm_type"] = "data_prediction" if out["algorithm_type"] else "noise_prediction"
    return out


def _grid_keys(reading: SchedulerSettings, name: str, keys: dict[str, Any]) -> dict[str, Any]:
    grid, out = reading.grid, {}
    edm = isinstance(reading.schedule, EDM)
    if grid.name == "explicit" or grid.start is not None:
        raise _refusal("grid", "a named one over the whole schedule", grid.to_dict())
    if grid.rho not in (None, 7.0) and not edm:
        raise _refusal("rho", f"7 in {name}", grid.rho)
    if edm:
        out = {"sigma_schedule": grid.name, "rho": 7.0 if grid.rho is None else grid.rho}
    elif grid.name in RULE_KEYS:
        if RULE_KEYS[grid.name] not in keys:
            raise _refusal("grid", f"one that {name} has", grid.name)
        out[RULE_KEYS[grid.name]] = True
    spacing = grid.name if grid.name in SPACINGS else grid.spacing
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
            raise _refusal(field_name, f"left out in {name}", value)
    return out


def _filter_keys(x0_filter: Filter | None, name: str, keys: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {k: False for k in ("clip_sample", "thresholding") if k in keys}
    if isinstance(x0_filter, Clip) and "clip_sample" in keys:
        return {**out, "clip_sample": True, "clip_sample_range": x0_filter.limit}
    if isinstance(x0_filter, DynamicThreshold) and "thresholding" in keys:
        ratio, most = x0_filter.quantile, x0_filter.most
        return {**out, "thresholding": True, "dynamic_thresholding_ratio": ratio, "sample_max_value": most}
    if x0_filter is not None:
        raise _refusal("x0_filter", f"one that {name} has", x0_filter)
    return out


def _target_keys(reading: SchedulerSettings, name: str, keys: dict[str, Any]) -> dict[str, Any]:
    spelled = TARGET_NAMES.get(reading.target, reading.target)
    if isinstance(reading.schedule, EDM):  # the class calls the preconditioned F "epsilon"
        spelled = {"edm": "epsilon", "v": "v_prediction"}.get(reading.target, "")
    if "prediction_type" not in keys:
        only = "flow" if name.startswith("FlowMatch") else "v"
        if reading.target != only:
            raise _refusal("target", f"{only} in {name}", reading.target)
        return {}
    if spelled not in TARGET_NAMES.values():
        raise _refusal("target", f"one that {name} has", reading.target)
    return {"prediction_type": spelled}


def _schedule_keys(curve: Schedule, name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The keys of a schedule: by its name where that gives the same numbers again, else its betas."""
    if name == "IPNDMScheduler":  # has a schedule of its own
        return {}
    if isinstance(curve, EDM):
        if curve.c_noise != "log":
            raise _refusal("c_noise", f"log in {name}", curve.c_noise)
        return {k: getattr(curve, k) for k in ("sigma_min", "sigma_max", "sigma_data")}
    if isinstance(curve, Flow):
        own = "shift" if "shift" in values else "flow_shift"
        out: dict[str, Any] = {own: curve.shift, "num_train_timesteps": int(curve.scale)}
        if own == "flow_shift":
            out["use_flow_sigmas"] = True
        if "shift_terminal" in values:
            out["shift_terminal"] = curve.terminal
    else:
        assert isinstance(curve, DiscreteVP)  # the dialect takes no other
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
    if named and set(out) <= set(values) and _says(curve, name, {**values, **out}):
        return out
    if isinstance(curve, DiscreteVP) and not curve.zero_terminal:
        return {"num_train_timesteps": curve.num_train, "trained_betas": curve.betas.tolist()}
    raise _refusal("schedule", f"one that {name} has", curve)


def _says(curve: Schedule, name: str, values: dict[str, Any]) -> bool:
    """Whether these keys give this schedule again."""
    try:
        again = schedule_of(name, values)
    except PellucidError:
        return False
    if isinstance(curve, DiscreteVP) and isinstance(again, DiscreteVP):
        return curve.num_train == again.num_train and bool(abs(curve.betas - again.betas).max() < 1e-12)
    return curve == again


def _jsonable(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value
