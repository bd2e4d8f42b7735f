"""The scheduler classes of diffusers that Pellucid reads: the sampler of each, its keys and their defaults.

A test compares the table with the signatures of diffusers itself, so that it cannot drift.
"""

from __future__ import annotations

import math
from typing import Any

_BETAS = {
    "num_train_timesteps": 1000,
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "trained_betas": None,
}
_SD_BETAS = {**_BETAS, "beta_start": 0.00085, "beta_end": 0.012}
_SCALED = {**_SD_BETAS, "beta_schedule": "scaled_linear"}
RULES = {"use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False}
_SPACED = {"timestep_spacing": "linspace", "steps_offset": 0}
_LEADING = {"timestep_spacing": "leading", "steps_offset": 0}
_CLIPS = {"clip_sample": True, "clip_sample_range": 1.0}
_THRESHOLDS = {"thresholding": False, "dynamic_thresholding_ratio": 0.995, "sample_max_value": 1.0}
_EPS = {"prediction_type": "epsilon"}
_ZERO_SNR = {"rescale_betas_zero_snr": False}
_FLOWS = {
    "use_flow_sigmas": False,
    "flow_shift": 1.0,
    "use_dynamic_shifting": False,
    "time_shift_type": "exponential",
}
_SOLVER = {
    "solver_order": 2,
    "algorithm_type": "dpmsolver++",
    "solver_type": "midpoint",
    "lambda_min_clipped": -math.inf,
    "variance_type": None,
}
_EDM_KEYS = {
    "sigma_min": 0.002,
    "sigma_max": 80.0,
    "sigma_data": 0.5,
    "sigma_schedule": "karras",
    "num_train_timesteps": 1000,
    "rho": 7.0,
    "final_sigmas_type": "zero",
}
_DISTILLED = {
    **_SCALED,
    "original_inference_steps": 50,
    **_CLIPS,
    "clip_sample": False,
    "set_alpha_to_one": True,
    **_LEADING,
    **_EPS,
    **_THRESHOLDS,
    "timestep_scaling": 10.0,
    **_ZERO_SNR,
}
DDIM = {**_BETAS, **_CLIPS, "set_alpha_to_one": True, **_LEADING, **_EPS, **_THRESHOLDS, **_ZERO_SNR}
_DDPM = {**_BETAS, "variance_type": "fixed_small", **_CLIPS, **_EPS, **_THRESHOLDS, **_LEADING, **_ZERO_SNR}

# class → (sampler, keys that it knows and their defaults)
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "DDIMScheduler": ("ddim", DDIM),
    "DDIMParallelScheduler": ("ddim", DDIM),
    "DDPMScheduler": ("ddpm", _DDPM),
    "DDPMParallelScheduler": ("ddpm", _DDPM),
    "DDIMInverseScheduler": (
        "ddim_inversion",
        {**_BETAS, **_CLIPS, "set_alpha_to_one": True, **_LEADING, **_EPS, **_ZERO_SNR},
    ),
    "PNDMScheduler": ("pndm", {**_BETAS, "skip_prk_steps": False, "set_alpha_to_one": False, **_EPS, **_LEADING}),
    "EulerDiscreteScheduler": (
        "euler",
        {
            **_BETAS,
            **_EPS,
            "interpolation_type": "linear",
            **RULES,
            "sigma_min": None,
            "sigma_max": None,
            **_SPACED,
            "timestep_type": "discrete",
            **_ZERO_SNR,
            "final_sigmas_type": "zero",
        },
    ),
    "EulerAncestralDiscreteScheduler": ("euler_a", {**_BETAS, **_EPS, **_SPACED, **_ZERO_SNR}),
    "HeunDiscreteScheduler": ("heun", {**_SD_BETAS, **_EPS, **RULES, **_CLIPS, "clip_sample": False, **_SPACED}),
    "LMSDiscreteScheduler": ("lms", {**_BETAS, **RULES, **_EPS, **_SPACED}),
    "KDPM2DiscreteScheduler": ("dpm2", {**_SD_BETAS, **RULES, **_EPS, **_SPACED}),
    "KDPM2AncestralDiscreteScheduler": ("dpm2_a", {**_SD_BETAS, **RULES, **_EPS, **_SPACED}),
    "DPMSolverSDEScheduler": ("dpmpp_sde", {**_SD_BETAS, **_EPS, **RULES, "noise_sampler_seed": None, **_SPACED}),
    "DPMSolverMultistepScheduler": (
        "dpm_multistep",
        {
            **_BETAS,
            **_SOLVER,
            **_EPS,
            **_THRESHOLDS,
            "lower_order_final": True,
            "euler_at_final": False,
            **RULES,
            "use_lu_lambdas": False,
            **_FLOWS,
            "final_sigmas_type": "zero",
            **_SPACED,
            **_ZERO_SNR,
        },
    ),
    "DPMSolverSinglestepScheduler": (
        "dpm_singlestep",
        {
            **_BETAS,
            **_SOLVER,
            **_EPS,
            **_THRESHOLDS,
            "lower_order_final": False,
            **RULES,
            **_FLOWS,
            "final_sigmas_type": "zero",
        },
    ),
    "UniPCMultistepScheduler": (
        "unipc",
        {
            **_BETAS,
            "solver_order": 2,
            **_EPS,
            **_THRESHOLDS,
            "predict_x0": True,
            "solver_type": "bh2",
            "lower_order_final": True,
            "disable_corrector": [],
            "solver_p": None,
            **RULES,
            **_FLOWS,
            **_SPACED,
            "final_sigmas_type": "zero",
            **_ZERO_SNR,
            "sigma_min": None,
            "sigma_max": None,
            "shift_terminal": None,
        },
    ),
    "DEISMultistepScheduler": (
        "deis",
        {
            **_BETAS,
            "solver_order": 2,
            **_EPS,
            **_THRESHOLDS,
            "algorithm_type": "deis",
            "solver_type": "logrho",
            "lower_order_final": True,
            **RULES,
            **_FLOWS,
            **_SPACED,
        },
    ),
    "SASolverScheduler": (
        "sa_solver",
        {
            **_BETAS,
            "predictor_order": 2,
            "corrector_order": 2,
            **_EPS,
            "tau_func": None,
            **_THRESHOLDS,
            "algorithm_type": "data_prediction",
            "lower_order_final": True,
            **RULES,
            "use_flow_sigmas": False,
            "flow_shift": 1.0,
            "lambda_min_clipped": -math.inf,
            "variance_type": None,
            **_SPACED,
        },
    ),
    "LCMScheduler": ("lcm", _DISTILLED),
    "TCDScheduler": ("tcd", _DISTILLED),
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
    "EDMEulerScheduler": ("euler", {**_EDM_KEYS, **_EPS}),
    "EDMDPMSolverMultistepScheduler": (
        "dpm_multistep",
        {
            **_EDM_KEYS,
            **_EPS,
            "solver_order": 2,
            **_THRESHOLDS,
            "algorithm_type": "dpmsolver++",
            "solver_type": "midpoint",
            "lower_order_final": True,
            "euler_at_final": False,
        },
    ),
    "CosineDPMSolverMultistepScheduler": (
        "dpm_multistep",
        {
            **_EDM_KEYS,
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

# What `step` takes after (model_output, timestep, sample), in diffusers' order; where a class is not here, return_dict.
_CHURN = ("s_churn", "s_tmin", "s_tmax", "s_noise", "generator")
_GENERATOR = ("generator", "return_dict")
_DDIM_STEP = ("eta", "use_clipped_model_output", "generator", "variance_noise", "return_dict")
STEP: dict[str, tuple[str, ...]] = {
    "DDIMScheduler": _DDIM_STEP,
    "DDIMParallelScheduler": _DDIM_STEP,
    "DDPMScheduler": _GENERATOR,
    "DDPMParallelScheduler": _GENERATOR,
    "EulerDiscreteScheduler": (*_CHURN, "return_dict"),
    "EulerAncestralDiscreteScheduler": _GENERATOR,
    "LMSDiscreteScheduler": ("order", "return_dict"),
    "KDPM2AncestralDiscreteScheduler": _GENERATOR,
    "DPMSolverSDEScheduler": ("return_dict", "s_noise"),
    "DPMSolverMultistepScheduler": ("generator", "variance_noise", "return_dict"),
    "DPMSolverSinglestepScheduler": _GENERATOR,
    "SASolverScheduler": _GENERATOR,
    "LCMScheduler": _GENERATOR,
    "TCDScheduler": ("eta", "generator", "return_dict"),
    "FlowMatchEulerDiscreteScheduler": (*_CHURN, "per_token_timesteps", "return_dict"),
    "FlowMatchHeunDiscreteScheduler": (*_CHURN, "return_dict"),
    "EDMEulerScheduler": (*_CHURN, "return_dict", "pred_original_sample"),
    "EDMDPMSolverMultistepScheduler": _GENERATOR,
    "CosineDPMSolverMultistepScheduler": _GENERATOR,
}
# What `step` returns beside prev_sample; where a class is not here, nothing.
SECOND: dict[str, str] = {
    **dict.fromkeys(
        (
            "DDIMScheduler",
            "DDIMParallelScheduler",
            "DDIMInverseScheduler",
            "DDPMScheduler",
            "DDPMParallelScheduler",
            "EulerDiscreteScheduler",
            "EulerAncestralDiscreteScheduler",
            "HeunDiscreteScheduler",
            "LMSDiscreteScheduler",
            "KDPM2DiscreteScheduler",
            "KDPM2AncestralDiscreteScheduler",
            "DPMSolverSDEScheduler",
            "EDMEulerScheduler",
        ),
        "pred_original_sample",
    ),
    "LCMScheduler": "denoised",
    "TCDScheduler": "pred_noised_sample",
}
# The classes that diffusers calls interchangeable (KarrasDiffusionSchedulers), and those that offer the change.
INTERCHANGEABLE = (
    "DDIMScheduler",
    "DDPMScheduler",
    "PNDMScheduler",
    "LMSDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "DEISMultistepScheduler",
    "UniPCMultistepScheduler",
    "DPMSolverSDEScheduler",
    "EDMEulerScheduler",
)
OFFERS_CHANGE = {
    *(name for name in INTERCHANGEABLE if not name.startswith("EDM")),
    "DDIMParallelScheduler",
    "DDPMParallelScheduler",
    "SASolverScheduler",
}

# Keys of classes that are not imported here; in another class's config they change nothing.
_ELSEWHERE = {
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
KNOWN = {key for _, keys in CLASSES.values() for key in keys} | _ELSEWHERE
