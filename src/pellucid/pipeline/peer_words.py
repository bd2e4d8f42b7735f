"""diffusers' words and ours. An option of theirs is refused with its name here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pellucid.core.errors import PellucidError, nearest

# Arguments of a pipeline's call.
CALL = {
    "num_inference_steps": "steps",
    "guidance_scale": "guidance",
    "guidance_rescale": 'guidance, as in guidance="7.5 + rescale phi=0.7"',
    "generator": 'seed, a whole number; noise="torch" draws what torch.Generator("cpu").manual_seed(seed) draws',
    "num_images_per_prompt": "n",
    "eta": 'options, as in sampler="ddim", options={"eta": 0.5}',
    "timesteps": "grid, such as pellucid.Grid.explicit, or plan",
    "sigmas": "grid, such as pellucid.Grid.explicit, or plan",
    "mask_image": "mask",
    "control_image": "controls, a list of pellucid.Control",
    "controlnet_conditioning_scale": "the scale of a pellucid.Control in controls",
    "control_guidance_start": "the start of a pellucid.Control in controls",
    "control_guidance_end": "the end of a pellucid.Control in controls",
    "guess_mode": "the guess of a pellucid.Control in controls",
    "ip_adapter_image": "image_prompts, a list of pellucid.ImagePrompt",
    "cross_attention_kwargs": "loras, a list of pellucid.Lora with a scale each",
    "crops_coords_top_left": "crop, which is (left, top)",
    "aesthetic_score": "aesthetic",
    "class_labels": "label",
    "callback": "observers, a list of functions that get a StepSeen after every model call",
    "callback_steps": "observers, which see every step",
    "callback_on_step_end": "observers, a list of functions that get a StepSeen after every model call; "
    "constraints may change x, and cancelled stops the run",
    "callback_on_step_end_tensor_inputs": "observers: a StepSeen holds x, x0 and the predictions",
    "output_type": "the result: .images are PIL images, .latents the latents; decode=False makes latents alone",
    "return_dict": "the result's fields: .images, .latents, .plan, .recipe",
}
# Arguments of `from_pretrained`.
LOAD = {
    "torch_dtype": "dtype",
    "device_map": 'device, or policy=pellucid.Policy(offload="component")',
    "use_safetensors": "nothing: only safetensors are read",
    "safety_checker": "nothing: no safety checker is loaded",
    "requires_safety_checker": "nothing: no safety checker is loaded",
    "low_cpu_mem_usage": "nothing: weights are read once, into their place",
    "cache_dir": "the environment variable HF_HOME",
    "scheduler": "sampler and grid in each call",
    "unet": "a folder with that UNet in it",
    "controlnet": "controls in each call",
}
# Attributes and methods of a pipeline.
PIPELINE = {
    "from_pretrained": "pellucid.load(…)",
    "from_single_file": "pellucid.load(…), which reads single files too",
    "save_pretrained": "pipe.save(folder)",
    "scheduler": 'sampler and grid in each call: pipe(prompt, sampler="dpmpp_2m", grid="karras")',
    "unet": "pipe.components.network",
    "transformer": "pipe.components.network",
    "vae": "pipe.components.vae; another one is given to pellucid.load(…, vae=…)",
    "text_encoder": "pipe.components.text_encoders",
    "tokenizer": "pipe.components.tokenizers",
    "config": "pipe.components",
    "load_lora_weights": "loras in each call: pipe(prompt, loras=[file, pellucid.Lora(file, 0.8)])",
    "unload_lora_weights": "nothing: a LoRA is part of one call",
    "set_adapters": "loras in each call: pipe(prompt, loras=[pellucid.Lora(file, 0.8)])",
    "fuse_lora": "pipe.merge(pellucid.Lora(file))",
    "unfuse_lora": ".unmerge() of what pipe.merge(…) returned",
    "load_textual_inversion": "pellucid.load(…, inversions=[file])",
    "load_ip_adapter": "image_prompts in each call: pipe(prompt, image_prompts=[pellucid.ImagePrompt(…)])",
    "set_ip_adapter_scale": "the scale of a pellucid.ImagePrompt",
    "enable_model_cpu_offload": 'pellucid.load(…, policy=pellucid.Policy(offload="component"))',
    "enable_sequential_cpu_offload": 'pellucid.load(…, policy=pellucid.Policy(offload="block"))',
    "enable_vae_tiling": "pellucid.load(…, policy=pellucid.Policy(vae_tile=64))",
    "enable_vae_slicing": "pellucid.load(…, policy=pellucid.Policy(vae_slicing=True))",
    "enable_attention_slicing": "pellucid.load(…, policy=pellucid.Policy(attention=…))",
    "enable_xformers_memory_efficient_attention": "pellucid.load(…, policy=pellucid.Policy(attention=…))",
    "enable_freeu": "nothing: FreeU is not here",
    "set_progress_bar_config": "observers in each call",
    "encode_prompt": "prompt, or prompt_embeds in each call",
}


class _PeerWordError(PellucidError, AttributeError):
    """An attribute that diffusers' pipelines have and ours do not; `hasattr` is False."""


def option_error(name: str, value: Any, known: Iterable[str], theirs: Mapping[str, str]) -> PellucidError:
    """For an option that is not there: the right name of diffusers' words, the nearest ones of others."""
    if name in theirs:
        return PellucidError(f"unknown option {name}; use {theirs[name]}.", "option")
    return PellucidError(f"unknown option {name}; got {value!r:.80}. {nearest(name, known)}", "option")


def attribute_error(name: str) -> AttributeError:
    if name in PIPELINE:
        return _PeerWordError(f"a pipeline has no {name}; use {PIPELINE[name]}.", "attribute")
    return AttributeError(f"'Pipeline' object has no attribute {name!r}")


class RefusesPeerWords:
    """A pipeline that answers diffusers' attributes and methods with the names of its own."""

    def __getattr__(self, name: str) -> Any:  # of what is not there
        raise attribute_error(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in PIPELINE:
            raise attribute_error(name)
        super().__setattr__(name, value)
