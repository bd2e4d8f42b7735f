"""diffusers scheduler configs → (schedule, target, sampler, grid, options, x0 filter).

Each class is a row of CLASSES (diffusers_classes.py). A key that another class knows has no effect here and becomes a
note; a key that no class knows, or a value that is not supported, is an error that names it.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pellucid.core import schedule as schedules
from pellucid.core import target as targets
from pellucid.core.errors import PellucidError, nearest, rule, shown
from pellucid.core.filters import Clip, DynamicThreshold, Filter
from pellucid.core.grid import Grid
from pellucid.core.reader import Bound, read_json, typed
from pellucid.core.schedule import EDM, DiscreteVP, Flow, Schedule
from pellucid.interop.diffusers_classes import CLASSES, KNOWN, RULES

MAX_CONFIG_BYTES = 4 * 2**20
FILE_NAME = "scheduler_config.json"
RULE_KEYS = {
    "karras": "use_karras_sigmas",
    "exponential": "use_exponential_sigmas",
    "beta": "use_beta_sigmas",
    "lu": "use_lu_lambdas",
}


@dataclass(frozen=True)
class SchedulerSettings:
    """What a scheduler config means: schedule, target, sampler, grid, options and filter."""

    class_name: str
    sampler: str
    schedule: Schedule
    target: str
    grid: Grid
    options: dict[str, Any]
    x0_filter: Filter | None = None
    values: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # keys that the class does not read: kept for another class
    defaults: tuple[str, ...] = ()  # keys that were not set (`_use_default_values`): another class has its own default
    notes: tuple[str, ...] = ()


def load(source: Any) -> dict[str, Any]:
    """A config dict from a dict, a JSON file, a folder that holds one, a live `.config`, or a live scheduler."""
    if isinstance(source, Mapping):
        for key in source:
            if not isinstance(key, str):
                raise PellucidError(rule("a key of the config", "a text", key), "config-key")
        return dict(source)
    if isinstance(source, (str, os.PathLike)):
        return _read_file(Path(source))
    config = getattr(source, "config", None)
    if isinstance(config, Mapping):
        return load({**config, "_class_name": config.get("_class_name", type(source).__name__)})
    raise PellucidError(rule("config", "a dict, a file, a folder or a scheduler", type(source).__name__), "config")


def _read_file(path: Path) -> dict[str, Any]:
    places = [path / FILE_NAME, path / "scheduler" / FILE_NAME] if path.is_dir() else [path]
    found = next((p for p in places if p.is_file()), None)
    if found is None:
        raise PellucidError(rule("config", f"a {FILE_NAME} or a folder that holds one", str(path)), "config-file")
    return read_json(found, MAX_CONFIG_BYTES, "config-file", foreign=True)


def chosen(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the defaults that its class filled in: a change of class does not take them along."""
    name = "_use_default_values"
    left_out = {name, *(typed(tuple[str, ...] | None, config.get(name), name) or ())}
    return {k: v for k, v in config.items() if k not in left_out}


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
    if not isinstance(name, str) or name not in CLASSES:
        raise PellucidError(
            rule("_class_name", "a class that Pellucid reads", name, nearest(str(name)[:80], CLASSES)),
            "config-class",
        )
    return name


def read(source: Any, strict: bool = True) -> SchedulerSettings:
    """Understands a config, or says which key stands in the way."""
    config = load(source)
    name = class_of(config)
    sampler, known = CLASSES[name]
    notes, problems = [], []
    for key, value in config.items():
        if key.startswith("_") or key in known:
            continue
        if key in KNOWN:
            notes.append(f"{key}={shown(value)} has no effect in {name}")
        else:
            must = "a key that some diffusers scheduler knows"
            problems.append(rule(key[:80], must, value, nearest(key[:80], KNOWN)))
    values = {k: _plain(config.get(k, default)) for k, default in known.items()}
    for key, value in values.items():
        _check_value(f"{key} of {name}", key, known[key], value)
    problems += unsupported(name, values)
    if problems and strict:
        raise PellucidError(" ".join(problems) + " Pass strict=False to ignore it.", "config-key")
    for problem in problems:
        warnings.warn(problem, stacklevel=3)
    if name == "TCDScheduler" and _filter_of(values) is not None:
        notes.append("clip_sample and thresholding have no effect in TCDScheduler")
    try:
        reading = _understand(name, sampler, values, tuple(notes))
        private = ("_class_name", "_use_default_values")
        extra = {k: v for k, v in config.items() if k not in known and k not in private}
        return replace(reading, extra=extra, defaults=tuple(k for k in known if k not in config))
    except PellucidError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise PellucidError(
            f"config of {name} must have values of the right kind; got {error}.", "config-value"
        ) from None


# Keys whose default does not say their type, and the numbers that have closer bounds than any.
_TYPES: dict[str, Any] = {
    "trained_betas": tuple[float, ...] | None,
    "disable_corrector": tuple[int, ...] | None,
    **dict.fromkeys(("sigma_min", "sigma_max", "shift_terminal"), float | None),
    **dict.fromkeys(("variance_type", "timestep_spacing"), str | None),
    "noise_sampler_seed": int | None,
}
_UNREAD = ("solver_p", "tau_func", "lambda_min_clipped")  # refused where they are not the default: see `unsupported`
_TRAINED, _ORDER, _FINITE = (1, 1_000_000), (1, 10), (-1e12, 1e12)
_LIMITS: dict[str, Bound] = {
    **dict.fromkeys(("num_train_timesteps", "original_inference_steps"), _TRAINED),
    **dict.fromkeys(("solver_order", "predictor_order", "corrector_order"), _ORDER),
    "noise_sampler_seed": (0, 2**64),
    "steps_offset": (-1e6, 1e6),
    "rho": (1e-2, 1e3),
    **dict.fromkeys(("sigma_min", "sigma_max", "sigma_data"), (1e-12, 1e12)),
}


def _check_value(where: str, key: str, default: Any, value: Any) -> None:
    """Refuses a value of another type than the key's: a text is no number and no boolean. Null is false."""
    if key in _UNREAD or (value is None and isinstance(default, bool)):
        return
    hint = _TYPES.get(key, type(default))
    if isinstance(value, float) and hint is int and value.is_integer():
        value = int(value)
    typed(hint, value, where, _LIMITS.get(key, _FINITE))


def _plain(value: Any) -> Any:
    """An array as a list: a config is what JSON can say."""
    return value.tolist() if hasattr(value, "tolist") else value


def _understand(name: str, sampler: str, values: dict[str, Any], notes: tuple[str, ...]) -> SchedulerSettings:
    kind = "flow" if name.startswith("FlowMatch") else values.get("prediction_type", "v")
    return SchedulerSettings(
        class_name=name,
        sampler="plms" if values.get("skip_prk_steps") else sampler,
        schedule=schedule_of(name, values),
        target=_target_of(name, kind, values),
        grid=_grid_of(name, values),
        options=_options_of(name, values),
        x0_filter=None if name == "TCDScheduler" else _filter_of(values),
        values=values,
        notes=notes,
    )


def unsupported(name: str, v: dict[str, Any]) -> list[str]:
    """Keys that would change the result and are not supported."""
    checks = {
        "interpolation_type": ("linear",),
        "lambda_min_clipped": (-math.inf, "-inf", "-Infinity"),
        "invert_sigmas": (False, None),
        "solver_p": (None,),
        "tau_func": (None,),
        "time_shift_type": ("exponential", "linear"),
    }
    if name == "IPNDMScheduler":
        checks["trained_betas"] = (None,)
    if name == "SASolverScheduler":
        checks["algorithm_type"] = ("data_prediction", "noise_prediction")
    if name == "UniPCMultistepScheduler":
        checks["solver_type"] = ("bh2", "bh1", "midpoint", "heun", "logrho")
    if v.get("use_flow_sigmas"):
        checks["prediction_type"] = ("flow_prediction", "epsilon", "sample")  # diffusers' v is not normalised there
    found = [
        f"{key} must be {allowed[0]!r} in {name}; got {shown(v[key])}, which is not supported."
        for key, allowed in checks.items()
        if key in v and (isinstance(v[key], (list, tuple)) or v[key] not in allowed)
    ]
    if name.startswith("DDPM") and v["variance_type"] in ("learned", "learned_range"):
        found.append(
            f"variance_type must be fixed in {name}; got {shown(v['variance_type'])}. "
            "Sampling with a learned variance is refused."
        )
    if name.startswith("EDM") and v["prediction_type"] not in ("epsilon", "v_prediction"):
        found.append(f"prediction_type must be epsilon or v_prediction in {name}; got {shown(v['prediction_type'])}.")
    if name.startswith("EDM") and v["prediction_type"] == "v_prediction" and v["sigma_data"] != 1.0:
        found.append(f"sigma_data must be 1.0 for v_prediction in {name}; got {shown(v['sigma_data'])}.")
    if _edm_like(v) and not (v["use_karras_sigmas"] and v["sigma_min"] and v["sigma_max"]):
        found.append(
            f"timestep_type must be discrete in {name} without karras sigmas and their ends; got 'continuous'."
        )
    if v.get("use_flow_sigmas") and any(v.get(k) for k in (*RULES, "use_lu_lambdas")):
        found.append(f"use_flow_sigmas must stand without another sigma rule in {name}; got both.")
    if v.get("use_flow_sigmas") and v.get("final_sigmas_type") == "sigma_min":
        found.append(f"final_sigmas_type must be 'zero' with use_flow_sigmas in {name}; got 'sigma_min'.")
    if v.get("shift_terminal") and not (v.get("use_flow_sigmas") or name.startswith("FlowMatch")):
        found.append(f"shift_terminal must go with use_flow_sigmas in {name}; got {shown(v['shift_terminal'])}.")
    return found


_BETA_SCHEDULES = {
    "linear": schedules.linear,
    "scaled_linear": schedules.scaled_linear,
    "sigmoid": schedules.sigmoid,
}
_CURVES = {"squaredcos_cap_v2": schedules.cosine, "exp": schedules.exponential, "laplace": schedules.laplace}


def _edm_like(v: dict[str, Any]) -> bool:
    """Stable Video Diffusion's set-up: a v model whose time is ¼·ln sigma, on karras sigmas of its own range."""
    return v.get("timestep_type") == "continuous" and v["prediction_type"] == "v_prediction"


def schedule_of(name: str, v: dict[str, Any]) -> Schedule:
    if _edm_like(v):
        return EDM(float(v["sigma_min"]), float(v["sigma_max"]), 1.0)
    if name == "IPNDMScheduler":
        return schedules.vp_cosine(u_min=1e-9)
    if "sigma_schedule" in v:
        c_noise: Literal["atan", "log"] = "atan" if name.startswith("Cosine") else "log"
        return EDM(float(v["sigma_min"]), float(v["sigma_max"]), float(v["sigma_data"]), c_noise)
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
        made: DiscreteVP = schedules.trained(v["trained_betas"])
    elif v["beta_schedule"] in _BETA_SCHEDULES:
        made = _BETA_SCHEDULES[v["beta_schedule"]](
            int(v["num_train_timesteps"]), float(v["beta_start"]), float(v["beta_end"])
        )
    elif v["beta_schedule"] in _CURVES:
        made = _CURVES[v["beta_schedule"]](int(v["num_train_timesteps"]))
    else:
        known = [*_BETA_SCHEDULES, *_CURVES]
        raise PellucidError(rule("beta_schedule", "one of " + ", ".join(known), v["beta_schedule"]), "config-key")
    return schedules.zero_terminal_snr(made) if v.get("rescale_betas_zero_snr") else made


def _target_of(name: str, kind: str, v: dict[str, Any]) -> str:
    if "sigma_schedule" in v:
        return "v" if kind == "v_prediction" else "edm"
    return targets.named(kind)


def _grid_of(name: str, v: dict[str, Any]) -> Grid:
    chosen = [name for name, key in RULE_KEYS.items() if v.get(key)]
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


def _options_of(name: str, v: dict[str, Any]) -> dict[str, Any]:
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
        return _solver_options(name, v)
    return {}


def _solver_options(name: str, v: dict[str, Any]) -> dict[str, Any]:
    algorithm = "sde-dpmsolver++" if name.startswith("Cosine") else v["algorithm_type"]
    algorithm = "dpmsolver++" if algorithm == "deis" else algorithm
    solver = "midpoint" if v["solver_type"] in ("logrho", "bh1", "bh2") else v["solver_type"]
    out = {"order": int(v["solver_order"]), "algorithm": algorithm, "solver": solver}
    out["lower_order_final"] = bool(v["lower_order_final"])
    if "euler_at_final" in v:
        out["euler_at_final"] = bool(v["euler_at_final"])
    return out


def _filter_of(v: dict[str, Any]) -> Filter | None:
    if v.get("thresholding"):
        return DynamicThreshold(float(v["dynamic_thresholding_ratio"]), float(v["sample_max_value"]))
    if v.get("clip_sample"):
        return Clip(float(v["clip_sample_range"]))
    return None
