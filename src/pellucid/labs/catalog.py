"""The labs by number and name: the question of each, and the paths of its page, starter and check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pellucid.core.errors import PellucidError, nearest, rule

HOME = Path(__file__).parent


@dataclass(frozen=True)
class Lab:
    """One lab; `section` is the page of the handbook that it belongs to."""

    number: int
    slug: str
    title: str
    section: str
    question: str

    @property
    def code(self) -> str:
        """`03`"""
        return f"{self.number:02d}"

    @property
    def stem(self) -> str:
        """What its files are called: `lab_03_reading_a_scheduler`."""
        return f"lab_{self.code}_{self.slug}"

    @property
    def page(self) -> Path:
        return HOME / "pages" / f"{self.stem}.py"

    @property
    def starter(self) -> Path:
        return HOME / "starters" / f"{self.stem}.py"

    @property
    def check(self) -> Path:
        return HOME / "checks" / f"lab_{self.code}.py"


# fmt: off
LABS = (
    Lab(1, "forward_noise", "Forward noise", "forward_and_reverse",
        "What does noise do to an image, and why can one formula jump to any level of it?"),
    Lab(2, "denoising_step", "One denoising step", "forward_and_reverse",
        "What happens between one noise level and the next?"),
    Lab(3, "reading_a_scheduler", "Reading a scheduler", "scheduler_and_sampler",
        "Which numbers does a scheduler hold, and which of them must agree with the network?"),
    Lab(4, "classifier_free_guidance", "Classifier-free guidance", "guidance",
        "What does a guidance scale change, and what does it cost?"),
    Lab(5, "latent_space", "Latent space", "vae",
        "What does the VAE keep, what does it lose, and what is its scaling factor for?"),
    Lab(6, "pipeline_components", "The components of a pipeline", "pipeline_anatomy",
        "Which parts does a pipeline have, and what passes between them?"),
    Lab(7, "conditioning", "Conditioning in UNet and DiT", "backbone",
        "By which ways do time and text reach the layers of a network?"),
    Lab(8, "lora_injection", "What a LoRA adds", "adapters",
        "Which weights does a LoRA change, and by how much?"),
    Lab(9, "controlnet", "An image that steers", "adapters",
        "How does a drawing steer a network that was never trained on drawings?"),
    Lab(10, "memory", "Where the bytes are", "memory_and_speed",
        "Which stage owns the peak of memory, and what does it cost to lower it?"),
    Lab(11, "the_loop", "The loop from end to end", "inference_loop",
        "Which tensors live from the prompt to the image, and what changes them at each step?"),
    Lab(12, "samplers_as_tables", "Samplers as tables", "scheduler_and_sampler",
        "How can Euler, Heun and DPM++ be one loop over different numbers?"),
    Lab(13, "schedules_and_training", "What a schedule does to training", "objective",
        "What does the noise schedule decide while a network is trained, and what do ranks exchange?"),
    Lab(14, "tuning", "Tuning a plan", "scheduler_and_sampler",
        "What can gradient descent do to a sampler once it is a table?"),
    Lab(15, "step_batching", "Step batching", "serving",
        "How can requests with different samplers, steps and guidance share a batch, and what does each gain or lose?"),
)
# fmt: on


def find(name: str) -> Lab:
    """A lab by its number (`3`, `03`) or its name (`reading_a_scheduler`)."""
    wanted = name.strip().lower().removesuffix(".py").replace("-", "_").replace(" ", "_")
    for lab in LABS:
        if wanted in (str(lab.number), lab.code, lab.slug, lab.stem):
            return lab
    must = f"a number from 1 to {len(LABS)} or the name of a lab"
    advice = nearest(wanted, (lab.slug for lab in LABS)) + " List them: pellucid lab."
    raise PellucidError(rule("lab", must, name, advice), "lab-name")
