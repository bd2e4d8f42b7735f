"""The set-ups that are compared with diffusers: axes by class, all of them or a pairwise selection."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

FEW = (1, 2, 3, 5, 10, 13, 20)
ALL = (*FEW, 50, 999, 1000)

SD = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
LEADING_1 = {"timestep_spacing": "leading", "steps_offset": 1}
SPACINGS = (
    {"timestep_spacing": "linspace"},
    {"timestep_spacing": "leading"},
    LEADING_1,
    {"timestep_spacing": "trailing"},
)
RULES = ({}, {"use_karras_sigmas": True}, {"use_exponential_sigmas": True}, {"use_beta_sigmas": True})
TARGETS = tuple({"prediction_type": kind} for kind in ("epsilon", "v_prediction", "sample"))
EPS_V = TARGETS[:2]
BETAS = (SD, {"beta_schedule": "linear"}, {"beta_schedule": "squaredcos_cap_v2"})
ORDERS = tuple({"solver_order": k} for k in (1, 2, 3))
SHAPES = ({"solver_type": "midpoint"}, {"solver_type": "heun"})
SNR_0 = {**SD, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction", "timestep_spacing": "trailing"}
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
ALGORITHMS = (
    {"algorithm_type": "dpmsolver++"},
    {"algorithm_type": "sde-dpmsolver++"},
    {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"},
    {"algorithm_type": "sde-dpmsolver", "final_sigmas_type": "sigma_min"},
)
UNIPC = (
    {"predict_x0": True},
    {"predict_x0": False, "final_sigmas_type": "sigma_min"},
)
ETAS = ({}, {"~eta": 0.5}, {"~eta": 1.0})
SHIFTS = ({"shift": 1.0}, {"shift": 3.0})

# class → axes; keys that start with ~ go to `step`, not to the config
AXES: dict[str, tuple[tuple[dict[str, Any], ...], ...]] = {
    "EulerDiscreteScheduler": (BETAS, SPACINGS, RULES, TARGETS, ({}, {"final_sigmas_type": "sigma_min"})),
    "EulerAncestralDiscreteScheduler": (BETAS, SPACINGS, EPS_V),
    "HeunDiscreteScheduler": (BETAS, SPACINGS, RULES, TARGETS),
    "LMSDiscreteScheduler": (BETAS, SPACINGS, RULES, TARGETS),
    "KDPM2DiscreteScheduler": (BETAS, SPACINGS, RULES, EPS_V),
    "KDPM2AncestralDiscreteScheduler": (BETAS, SPACINGS, RULES, EPS_V),
    "DPMSolverSDEScheduler": (BETAS, SPACINGS, RULES, EPS_V),
    "DDIMScheduler": (
        BETAS,
        SPACINGS,
        TARGETS,
        ETAS,
        ({"clip_sample": False}, {}, {"thresholding": True, "sample_max_value": 2.0}),
        ({}, {"set_alpha_to_one": False}),
    ),
    "DDPMScheduler": (
        (*BETAS, {"beta_schedule": "sigmoid"}, {"beta_schedule": "laplace"}),
        SPACINGS,
        TARGETS,
        tuple({"variance_type": v} for v in ("fixed_small", "fixed_large", "fixed_small_log")),
        ({"clip_sample": False}, {}),
    ),
    "DDIMInverseScheduler": (
        BETAS,
        (*SPACINGS[1:],),
        EPS_V,
        ({"clip_sample": False}, {}),
        ({}, {"set_alpha_to_one": False}),
    ),
    "PNDMScheduler": (BETAS, SPACINGS, EPS_V, ({"skip_prk_steps": True}, {}), ({}, {"set_alpha_to_one": True})),
    "DPMSolverMultistepScheduler": (
        BETAS,
        SPACINGS,
        (*RULES, {"use_lu_lambdas": True}),
        TARGETS,
        ORDERS,
        ALGORITHMS,
        SHAPES,
        ({}, {"euler_at_final": True}, {"lower_order_final": False}),
    ),
    "DPMSolverSinglestepScheduler": (BETAS, RULES, TARGETS, ORDERS, ALGORITHMS[:3], SHAPES),
    "UniPCMultistepScheduler": (
        BETAS,
        SPACINGS,
        RULES,
        TARGETS,
        ORDERS,
        ({"solver_type": "bh1", "final_sigmas_type": "sigma_min"}, {}),
        UNIPC,
        ({}, {"disable_corrector": [0]}),
    ),
    "DEISMultistepScheduler": (BETAS, SPACINGS, RULES, TARGETS, ORDERS, ({}, {"lower_order_final": False})),
    "SASolverScheduler": (
        BETAS,
        SPACINGS,
        RULES,
        TARGETS,
        tuple({"predictor_order": p} for p in (1, 2, 3)),
        tuple({"corrector_order": c} for c in (1, 2, 3, 4)),
        ({}, {"algorithm_type": "noise_prediction"}),
    ),
    "LCMScheduler": (BETAS, TARGETS, ({}, {"clip_sample": True})),
    "TCDScheduler": (BETAS, TARGETS, ({"~eta": 0.0}, {"~eta": 0.3}, {"~eta": 1.0})),
    "IPNDMScheduler": (({},),),
    "FlowMatchEulerDiscreteScheduler": (
        RULES,
        SHIFTS,
        ({}, {"stochastic_sampling": True}),
        ({}, {"shift_terminal": 0.1}),
    ),
    "FlowMatchHeunDiscreteScheduler": (SHIFTS,),
    "EDMEulerScheduler": (({}, {"sigma_schedule": "exponential"}), ({}, {"final_sigmas_type": "sigma_min"})),
    "EDMDPMSolverMultistepScheduler": (({}, {"sigma_schedule": "exponential"}), ORDERS, ALGORITHMS[:2], SHAPES),
    "CosineDPMSolverMultistepScheduler": (SHAPES,),
}

# set-ups that no axis reaches
SINGLE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("EulerDiscreteScheduler", SNR_0),
    ("EulerAncestralDiscreteScheduler", SNR_0),
    ("DDIMScheduler", {**SNR_0, "clip_sample": False}),
    ("DPMSolverMultistepScheduler", SNR_0),
    ("UniPCMultistepScheduler", SNR_0),
    (
        "EulerDiscreteScheduler",
        {
            **SD,
            "timestep_type": "continuous",
            "prediction_type": "v_prediction",
            "use_karras_sigmas": True,
            "sigma_min": 0.002,
            "sigma_max": 700.0,
        },
    ),
    (
        "EulerDiscreteScheduler",
        {
            **SD,
            "timestep_type": "continuous",
            "prediction_type": "v_prediction",
            "use_karras_sigmas": True,
            "sigma_min": 0.002,
            "sigma_max": 700.0,
            "timestep_spacing": "leading",
        },
    ),
    *(
        (name, {**FLOW, "flow_shift": shift})
        for shift in (1.0, 3.0)
        for name in (
            "DPMSolverMultistepScheduler",
            "DPMSolverSinglestepScheduler",
            "UniPCMultistepScheduler",
            "DEISMultistepScheduler",
            "SASolverScheduler",
        )
    ),
    ("DPMSolverMultistepScheduler", {**SD, "thresholding": True, "sample_max_value": 2.0}),
    ("DDIMScheduler", {"trained_betas": [0.001 + 0.00002 * i for i in range(400)], "num_train_timesteps": 400}),
)


@dataclass(frozen=True)
class Case:
    class_name: str
    steps: int
    config: dict[str, Any] = field(hash=False)
    step_kwargs: dict[str, Any] = field(hash=False, default_factory=dict)

    def __str__(self) -> str:
        words = [
            f"{k.removeprefix('use_').removeprefix('~')}={v}" for k, v in {**self.config, **self.step_kwargs}.items()
        ]
        return f"{self.class_name}-{self.steps}-" + ",".join(words)[:110]


def make(class_name: str, parts: tuple[dict[str, Any], ...], steps: int) -> Case:
    merged = {k: v for part in parts for k, v in part.items()}
    config = {k: v for k, v in merged.items() if not k.startswith("~")}
    return Case(class_name, steps, config, {k[1:]: v for k, v in merged.items() if k.startswith("~")})


def pairwise(axes: tuple[tuple[Any, ...], ...]) -> list[tuple[Any, ...]]:
    """Rows in which every pair of values of two axes stands at least once, by a greedy choice."""
    sizes = [range(len(axis)) for axis in axes]
    if len(axes) == 1:
        return [(value,) for value in axes[0]]
    missing = {
        ((i, a), (j, b)) for i, j in itertools.combinations(range(len(axes)), 2) for a in sizes[i] for b in sizes[j]
    }
    rows = []
    while missing:
        chosen = dict(min(missing))
        for i in (k for k in range(len(axes)) if k not in chosen):
            gains = [sum(tuple(sorted(((i, v), other))) in missing for other in chosen.items()) for v in sizes[i]]
            chosen[i] = gains.index(max(gains))
        row = sorted(chosen.items())
        missing -= set(itertools.combinations(row, 2))
        rows.append(tuple(axes[i][v] for i, v in row))
    return rows


def selection() -> Iterator[Case]:
    """Every pair of values of every class, step counts up to 20 included as an axis."""
    for class_name, axes in AXES.items():
        for row in pairwise((*axes, FEW)):
            yield make(class_name, row[:-1], row[-1])
    for class_name, config in SINGLE:
        yield Case(class_name, 10, config)


def sweep() -> Iterator[Case]:
    """Spacing × sigma rule × target × every step count, and every pair of the other options at every step count."""
    for class_name, axes in AXES.items():
        plain = tuple(axis for axis in axes if axis in (SPACINGS, RULES, TARGETS, EPS_V))
        others = tuple(axis[:1] if axis in plain else axis for axis in axes)
        wide = [tuple(axis[:1] if axis not in plain else axis for axis in axes)]
        rows = {str(r): r for product in wide for r in itertools.product(*product)}
        rows |= {str(r): r for r in pairwise(axes)} | {str(r): r for r in pairwise(others)}
        for row, steps in itertools.product(rows.values(), ALL):
            yield make(class_name, row, steps)
    for (class_name, config), steps in itertools.product(SINGLE, ALL):
        yield Case(class_name, steps, config)
