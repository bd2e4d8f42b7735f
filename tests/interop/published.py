"""Scheduler configs as published models carry them, word for word but for versions: all of them are healthy."""

from __future__ import annotations

from typing import Any

LATENT: dict[str, Any] = {
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "num_train_timesteps": 1000,
    "trained_betas": None,
}
OLD: dict[str, Any] = {**LATENT, "clip_sample": False, "set_alpha_to_one": False, "skip_prk_steps": True}
SD15: dict[str, Any] = {"_class_name": "PNDMScheduler", **OLD, "steps_offset": 1}
SD21_V: dict[str, Any] = {
    "_class_name": "DDIMScheduler",
    **OLD,
    "prediction_type": "v_prediction",
    "steps_offset": 1,
}
SDXL: dict[str, Any] = {
    "_class_name": "EulerDiscreteScheduler",
    **OLD,
    "interpolation_type": "linear",
    "prediction_type": "epsilon",
    "sample_max_value": 1.0,
    "steps_offset": 1,
    "timestep_spacing": "leading",
    "use_karras_sigmas": False,
}
FLUX: dict[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
EDM: dict[str, Any] = {
    "_class_name": "EDMDPMSolverMultistepScheduler",
    "algorithm_type": "dpmsolver++",
    "dynamic_thresholding_ratio": 0.995,
    "euler_at_final": False,
    "final_sigmas_type": "zero",
    "lower_order_final": True,
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "rho": 7.0,
    "sample_max_value": 1.0,
    "sigma_data": 0.5,
    "sigma_max": 80.0,
    "sigma_min": 0.002,
    "solver_order": 2,
    "solver_type": "midpoint",
    "thresholding": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "stable-diffusion-v1-4": {k: v for k, v in SD15.items() if k != "clip_sample"},
    "stable-diffusion-v1-5": SD15,
    "stable-diffusion-inpainting": {
        "_class_name": "DDIMScheduler", **LATENT, "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1
    },
    "stable-diffusion-2-1": SD21_V,
    "stable-diffusion-2-1 with PNDM": {**SD21_V, "_class_name": "PNDMScheduler"},
    "stable-diffusion-2-1-base": {**SD15, "prediction_type": "epsilon"},
    "sd-turbo": {**SDXL, "timestep_spacing": "trailing"},
    "sdxl-turbo": {
        **{k: v for k, v in SDXL.items() if k != "use_karras_sigmas"},
        "_class_name": "EulerAncestralDiscreteScheduler", "timestep_spacing": "trailing",
    },
    "stable-diffusion-xl-base-1.0": SDXL,
    "stable-video-diffusion": {
        **SDXL, "prediction_type": "v_prediction", "sigma_max": 700.0, "sigma_min": 0.002,
        "timestep_type": "continuous", "use_karras_sigmas": True,
    },
    "zero123plus": {
        "_class_name": "EulerAncestralDiscreteScheduler", **OLD, "beta_schedule": "linear",
        "prediction_type": "v_prediction", "steps_offset": 1,
    },
    "zero-snr fine-tune": {
        **SDXL, "prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"
    },
    "LCM_Dreamshaper_v7": {
        "_class_name": "LCMScheduler", **OLD, "clip_sample_range": 1.0, "dynamic_thresholding_ratio": 0.995,
        "original_inference_steps": 50, "prediction_type": "epsilon", "rescale_betas_zero_snr": False,
        "sample_max_value": 1.0, "set_alpha_to_one": True, "steps_offset": 1, "thresholding": False,
        "timestep_scaling": 10.0, "timestep_spacing": "leading",
    },
    "stable-diffusion-3": {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0},
    "FLUX.1-dev": FLUX,
    "FLUX.1-schnell": {**FLUX, "shift": 1.0, "use_dynamic_shifting": False},
    "Sana": {
        "_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "dpmsolver++", "beta_end": 0.02,
        "beta_schedule": "linear", "beta_start": 0.0001, "final_sigmas_type": "zero", "flow_shift": 3.0,
        "prediction_type": "flow_prediction", "solver_order": 2, "timestep_spacing": "linspace",
        "use_flow_sigmas": True,
    },
    "PixArt-XL-2": {
        "_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "dpmsolver++", "beta_end": 0.02,
        "beta_schedule": "linear", "beta_start": 0.0001, "dynamic_thresholding_ratio": 0.995, "euler_at_final": False,
        "lambda_min_clipped": "-Infinity", "lower_order_final": True, "num_train_timesteps": 1000,
        "prediction_type": "epsilon", "sample_max_value": 1.0, "solver_order": 2, "solver_type": "midpoint",
        "steps_offset": 0, "thresholding": False, "timestep_spacing": "linspace", "trained_betas": None,
        "use_karras_sigmas": False, "use_lu_lambdas": False, "variance_type": None,
    },
    "DiT-XL-2-256": {
        "_class_name": "DDIMScheduler", "beta_end": 0.02, "beta_schedule": "linear", "beta_start": 0.0001,
        "clip_sample": False, "num_train_timesteps": 1000, "prediction_type": "epsilon", "set_alpha_to_one": True,
        "steps_offset": 0, "trained_betas": None,
    },
    "ddpm-cifar10-32": {
        "_class_name": "DDPMScheduler", "beta_end": 0.02, "beta_schedule": "linear", "beta_start": 0.0001,
        "clip_sample": True, "num_train_timesteps": 1000, "trained_betas": None, "variance_type": "fixed_large",
    },
    "playground-v2.5": EDM,
    "stable-audio": {
        "_class_name": "CosineDPMSolverMultistepScheduler", "euler_at_final": False, "final_sigmas_type": "zero",
        "lower_order_final": True, "num_train_timesteps": 1000, "prediction_type": "v_prediction", "rho": 7.0,
        "sigma_data": 1.0, "sigma_max": 500, "sigma_min": 0.3, "sigma_schedule": "exponential", "solver_order": 2,
        "solver_type": "midpoint",
    },
    "CogVideoX": {
        "_class_name": "CogVideoXDDIMScheduler", **LATENT, "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True, "snr_shift_scale": 3.0, "timestep_spacing": "trailing",
    },
    "stable-cascade": {"_class_name": "DDPMWuerstchenScheduler", "s": 0.008, "scaler": 1.0},
    "stable-diffusion-2-1 for Flax": {**SD21_V, "_class_name": "FlaxDDIMScheduler"},
}  # fmt: skip
