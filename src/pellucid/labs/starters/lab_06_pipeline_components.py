"""Lab 06: the components of a pipeline. Fill in the four stages, then run `pellucid lab 06 --check FILE`.

Together they must make the image that `pipe(prompt)` makes. The stages are called without gradients.
"""

from torch import Tensor

from pellucid import Scheduler
from pellucid.interop.tokenizer import Tokenizer
from pellucid.models.clip import CLIPTextEncoder
from pellucid.models.unet import UNet
from pellucid.models.vae import AutoencoderKL


def tokens(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Token ids (len(texts), tokenizer.length): BOS, the text, EOS, padding.

    `tokenizer.ids(text)` are the ids of the words alone; `bos`, `eos`, `pad` and `length` are fields of the tokenizer.
    """
    raise NotImplementedError


def states(encoder: CLIPTextEncoder, ids: Tensor) -> Tensor:
    """The last hidden states (texts, tokens, width), after the final norm; see TextStates in models/clip.py."""
    raise NotImplementedError


def denoise(network: UNet, scheduler: Scheduler, noise: Tensor, context: Tensor, scale: float) -> Tensor:
    """Clean latents from unit noise (1, 4, 16, 16). `context` is (2, 64, 128): the empty text, then the prompt.

    The scheduler's steps are set. Use init_noise_sigma, timesteps, scale_model_input and step(…).prev_sample;
    `network(x, times, context)` takes one time an image.
    """
    raise NotImplementedError


def decode(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """An image (1, 3, 128, 128) in [0, 1] from clean latents."""
    raise NotImplementedError
