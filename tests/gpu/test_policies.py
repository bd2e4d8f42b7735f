"""Pipelines on a GPU: the image of the CPU, under every policy. Run with: pytest -m gpu tests/gpu"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pellucid import Pipeline, Policy
from pellucid.core.schedule import make
from pellucid.interop.components import Components
from pellucid.interop.tokenizer import Tokenizer
from pellucid.models import config, unet_config
from pellucid.models.clip import CLIPTextEncoder
from pellucid.models.clip_config import CLIPTextConfig
from pellucid.models.unet import UNet
from pellucid.models.vae import AutoencoderKL, VAEConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ASKED = {"sampler": "dpmpp_2m", "steps": 4, "seed": 3, "width": 64, "height": 64, "guidance": "5 + rescale"}


def pipeline(device: str, policy: Policy | None = None, dtype: torch.dtype = torch.float32) -> Pipeline:
    """A small model of random weights, the same on every device."""
    torch.manual_seed(0)
    unet = UNet(
        unet_config.read(
            {
                "sample_size": 16,
                "block_out_channels": [64, 128],
                "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
                "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
                "cross_attention_dim": 64,
            }
        )
    )
    levels = {"block_out_channels": (32, 64, 64), "layers_per_block": 1, "latent_channels": 4}
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    vae = AutoencoderKL(VAEConfig(**levels, **kinds))
    text = {"vocab_size": 600, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    encoder = CLIPTextEncoder(config.read(CLIPTextConfig, {**text, "num_attention_heads": 2}), projection=False)
    policy = policy or Policy()
    networks = [network.to(dtype).eval().requires_grad_(False) for network in (unet, vae, encoder)]
    if policy.offload == "none":
        networks = [network.to(device) for network in networks]
    unet, vae, encoder = networks
    parts = Components(
        "small", "StableDiffusionPipeline", unet, vae, (encoder,), (Tokenizer.from_merges([]),), None, (), {},
        make("scaled_linear"), "eps",
    )  # fmt: skip
    return Pipeline(parts, policy, torch.device(device))


def pixels(pipe: Pipeline) -> np.ndarray:
    return np.asarray(pipe("a red star", **ASKED).images[0]).astype(float)


@pytest.fixture(scope="module")
def on_cpu() -> np.ndarray:
    return pixels(pipeline("cpu"))


POLICIES = [
    Policy(),
    Policy(channels_last=True),
    Policy(vae_tile=16),
    Policy(vae_slicing=True),
    Policy(offload="component"),
    Policy(offload="block"),
    Policy(compile=True),
    Policy(without=("graphs",)),
    Policy(without=("fused",)),
    Policy(without=("channels_last", "fused", "graphs")),
    Policy(attention="efficient"),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what torch says of itself when it compiles
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # and what it advises then
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.to_dict()))
def test_the_image_of_the_cpu_under_every_policy(policy: Policy, on_cpu: np.ndarray) -> None:
    """float32 on both; TF32 is off by default in matrix products, convolutions may use it."""
    torch.backends.cudnn.allow_tf32 = False
    made = pixels(pipeline("cuda", policy))
    assert np.abs(made - on_cpu).mean() < 0.5  # of 255
    assert np.abs(made - on_cpu).max() <= 8


def test_half_precision_is_near(on_cpu: np.ndarray) -> None:
    made = pixels(pipeline("cuda", dtype=torch.bfloat16))
    assert np.abs(made - on_cpu).mean() < 12


def test_offload_leaves_nothing_on_the_device() -> None:
    pipe = pipeline("cuda", Policy(offload="component"))
    pixels(pipe)
    held = {weight.device.type for network in pipe.networks().values() for weight in network.parameters()}
    assert held == {"cpu"}


def test_the_stages_tell_their_peaks() -> None:
    made = pipeline("cuda")("a red star", **ASKED)
    assert all(stage.peak and stage.peak > 0 for stage in made.stages)
