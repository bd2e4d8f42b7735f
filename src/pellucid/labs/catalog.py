"""The labs by number and name: what each asks, and where its page, its starter and its check lie."""

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
    question: str
    section: str

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


LABS = (
    Lab(
        1,
        "forward_noise",
        "Forward noise",
        "What does noise do to an image, and why can one formula jump to any level of it?",
        "forward_and_reverse",
    ),
    Lab(
        2,
        "denoising_step",
        "One denoising step",
        "What happens between one noise level and the next?",
        "forward_and_reverse",
    ),
    Lab(
        3,
        "reading_a_scheduler",
        "Reading a scheduler",
        "Which numbers does a scheduler hold, and which of them must agree with the network?",
        "scheduler_and_sampler",
    ),
    Lab(
        4,
        "classifier_free_guidance",
        "Classifier-free guidance",
        "What does a guidance scale change, and what does it cost?",
        "guidance",
    ),
    Lab(
        5,
        "latent_space",
        "Latent space",
        "What does the VAE keep, what does it lose, and what is its scaling factor for?",
        "vae",
    ),
    Lab(
        6,
        "pipeline_components",
        "The components of a pipeline",
        "Which parts does a pipeline have, and what passes between them?",
        "pipeline_anatomy",
    ),
    Lab(
        7,
        "conditioning",
        "Conditioning in UNet and DiT",
        "By which ways do time and text reach the layers of a network?",
        "backbone",
    ),
    Lab(8, "lora_injection", "What a LoRA adds", "Which weights does a LoRA change, and by how much?", "adapters"),
    Lab(
        9,
        "controlnet",
        "An image that steers",
        "How does a drawing steer a network that was never trained on drawings?",
        "adapters",
    ),
    Lab(
        10,
        "memory",
        "Where the bytes are",
        "Which stage owns the peak of memory, and what does it cost to lower it?",
        "memory_and_speed",
    ),
    Lab(
        11,
        "the_loop",
        "The loop from end to end",
        "Which tensors live from the prompt to the image, and what changes them at each step?",
        "inference_loop",
    ),
    Lab(
        12,
        "samplers_as_tables",
        "Samplers as tables",
        "How can Euler, Heun and DPM++ be one loop over different numbers?",
        "scheduler_and_sampler",
    ),
    Lab(
        13,
        "schedules_and_training",
        "What a schedule does to training",
        "What does the noise schedule decide while a network is trained, and what do ranks exchange?",
        "objective",
    ),
    Lab(
        14,
        "tuning",
        "Tuning a plan",
        "What can gradient descent do to a sampler once it is a table?",
        "scheduler_and_sampler",
    ),
)


def find(name: str) -> Lab:
    """A lab by its number (`3`, `03`) or its name (`reading_a_scheduler`)."""
    wanted = name.strip().lower().removesuffix(".py").replace("-", "_").replace(" ", "_")
    for lab in LABS:
        if wanted in (str(lab.number), lab.code, lab.slug, lab.stem):
            return lab
    must = f"a number from 1 to {len(LABS)} or the name of a lab"
    advice = nearest(wanted, (lab.slug for lab in LABS)) + " List them: pellucid lab."
    raise PellucidError(rule("lab", must, name, advice), "lab-name")
