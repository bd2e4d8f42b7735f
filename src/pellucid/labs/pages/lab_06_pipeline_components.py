r"""
Lab 06: The components of a pipeline
====================================

**Question.** Which parts does ``pipe(prompt)`` consist of, what goes from one to the next, and can one run them by hand
and get the same image?

**Handbook.** :doc:`/handbook/pipeline_anatomy`

**Mechanism.** A pipeline is a folder of independent parts, each with a config of its own, and a few lines that pass
tensors along:

.. math::

   \text{text} \xrightarrow{\text{tokenizer}} (B, 64) \xrightarrow{\text{text encoder}} (B, 64, 128)
   \xrightarrow{\text{loop: denoiser, scheduler}} (B, 4, 16, 16) \xrightarrow{\text{VAE}} (B, 3, 128, 128)

The parts know nothing of each other. What they must agree on (the length of a text, the meaning of the output, the
scale of the latents) is in their configs, and nothing checks it while an image is made.
"""

# %%
# What is in the folder
# ---------------------
# ``scenes-128`` has the layout of Stable Diffusion's folders: one folder a part, and an index that names the classes.
import matplotlib.pyplot as plt
import numpy as np
import torch

import pellucid
from pellucid import scenes
from pellucid.core.table import mix
from pellucid.interop.source import bundled
from pellucid.labs import few
from pellucid.pipeline.images import to_images

folder = bundled("scenes-128")
print((folder / "model_index.json").read_text())

# %%
# Loaded, each part is an object. Parameters say where the weight is; the tokenizer and the scheduler have none.
pipe = pellucid.load("scenes-128")
parts = pipe.components
tokenizer, encoder, network, vae = parts.tokenizers[0], parts.text_encoders[0], parts.network, parts.vae
for name, part in (("text encoder", encoder), ("denoiser", network), ("VAE", vae)):
    count = sum(weight.numel() for weight in part.parameters())
    print(
        f"{name:12} {type(part).__name__:16} {count / 1e6:5.2f} M parameters, {4 * count / 2**20:5.1f} MiB in float32"
    )
print(f"tokenizer    {tokenizer.size} entries, windows of {tokenizer.length}")
print("scheduler   ", {k: parts.scheduler[k] for k in ("_class_name", "prediction_type", "beta_schedule")})

# %%
# The image to reproduce
# ------------------------
# Without a sampler named, a folder keeps its own scheduler, and torch's generator makes the noise: as diffusers would.
prompt = "a small striped blue square above a large green circle on a grey background"
steps, scale, seed = few(12, 6), 4.0, 7
made = pipe(prompt, steps=steps, guidance=scale, seed=seed)
print({stage.name: f"{1000 * stage.seconds:.0f} ms" for stage in made.stages}, made.plan.name, made.plan.nfe, "calls")

# %%
# Stage 1: the tokenizer
# ----------------------
# Words become numbers. Every text fills a window of 64: a start, the words, an end, and the end again until it is full.
ids = torch.tensor([tokenizer.encode(""), tokenizer.encode(prompt)])  # the empty prompt first: it is uncond
print(f"{tuple(ids.shape)}:", [tokenizer.token(i) for i in ids[1].tolist()[:17]], "…")

# %%
# Stage 2: the text encoder
# -------------------------
# A vector of 128 numbers for each of the 64 places. The denoiser never sees the words, only these.
with torch.no_grad():
    context = encoder(ids).last
print(f"context {tuple(context.shape)}: (cond and uncond, tokens, width)")


# %%
# Stage 3: the loop
# -----------------
# The scheduler says how large the first noise is, which times to tell, how to scale the input, and what becomes of the
# prediction. The denoiser and guidance stand between. These eight lines are the pipeline.
def denoise(scheduler, context):
    """From the seed's noise to clean latents, with the scheduler's three calls."""
    scheduler.set_timesteps(steps)
    x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(seed)) * scheduler.init_noise_sigma
    with torch.no_grad():
        for time in scheduler.timesteps:
            both = scheduler.scale_model_input(torch.cat([x, x]), time)
            uncond, cond = network(both, torch.full((2,), float(time)), context).chunk(2)
            x = scheduler.step(uncond + scale * (cond - uncond), time, x).prev_sample
    return x


latents = denoise(pellucid.Scheduler.from_config(parts.scheduler), context)
print(f"latents {tuple(latents.shape)}, {(latents - made.latents).abs().max():.1e} from the pipeline's")


# %%
# Stage 4: the VAE
# ----------------
# Latents out of the scale of diffusion, through the decoder, from [−1, 1] to bytes. It is the pipeline's image; where
# float32 was rounded in another order, a byte may be one of 255 away.
def decoded(latents):
    """The decoded image, (1, 3, 128, 128) within [−1, 1]."""
    with torch.no_grad():
        return vae.decode(latents / vae.config.scaling_factor).clamp(-1, 1)


image = to_images(decoded(latents))[0]
apart = np.abs(np.array(image).astype(int) - np.array(made.images[0]).astype(int))
print(f"largest difference of a byte: {apart.max()}; bytes that differ: {(apart > 0).sum()} of {apart.size}")
assert apart.max() <= 1

# %%
# To the last bit
# ---------------
# The engine runs the plan, a table of weights, and not the scheduler's three calls. In its order of operations, by
# hand, the latents are the same bit by bit, and so is the image.
x, history = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(seed)) * made.plan.initial_scale, []
with torch.no_grad():
    for row in made.plan.rows:
        uncond, cond = network(torch.cat([x, x]), torch.full((2,), row.time), context).chunk(2)
        v = torch.add(uncond, cond - uncond, alpha=scale)
        x0 = (x * row.level.alpha).add_(v * -row.level.sigma)
        x, history = mix(row.x, [x, None, x0, *history]), [x0]
exact = to_images(decoded(x))[0]
print("same latents:", torch.equal(x, made.latents), " same image:", np.array_equal(exact, made.images[0]))
assert np.array_equal(exact, made.images[0])

# %%
# Where the time goes, and where the weights are.
figure, axes = plt.subplots(1, 3, figsize=(8, 2.6), layout="constrained")
axes[0].imshow(image)
axes[0].set_title("by hand", fontsize=10)
axes[0].set_axis_off()
axes[1].barh([s.name for s in made.stages], [1000 * s.seconds for s in made.stages])
axes[1].set(xlabel="ms", title="time by stage")
counts = [sum(weight.numel() for weight in part.parameters()) / 1e6 for part in (encoder, network, vae)]
axes[2].barh(["text encoder", "denoiser", "VAE"], counts)
axes[2].set(xlabel="million parameters", title="weights")

# %%
# What to notice
# --------------
# - The loop is the only place where a part runs more than once. Text and VAE run once, whatever the number of steps.
# - Between the stages there are three tensors. Whoever keeps one can stop there and go on later, elsewhere.
# - The scheduler has no weights. It is a config, and the config belongs to the weights of the denoiser.

# %%
# What goes wrong
# ---------------
# **Another way to fill the window.** The encoder was trained with the end token as the filling, always to 64. Filled
# with zeros, or not filled at all, each word still has its own vector, and the image is another: the denoiser
# attends to the filling too, and by training much of what it reads is there.
wanted = scenes.parse(prompt)


def share(latents):
    """How much of what the prompt asks for the image has."""
    marks = scenes.grade(decoded(latents), [wanted])[0].marks
    return sum(mark.verdict == "right" for mark in marks) / len(marks)


def encoded(fill, length):
    """Both texts in windows of a length, filled with a token."""
    rows = [[tokenizer.bos, *tokenizer.ids(text), tokenizer.eos] for text in ("", prompt)]
    with torch.no_grad():
        return encoder(torch.tensor([row + [fill] * (length - len(row)) for row in rows])).last


# %%
# Three windows for the same words.
own = pellucid.Scheduler.from_config(parts.scheduler)
shortest = len(tokenizer.ids(prompt)) + 2
windows = {
    "as trained": denoise(own, encoded(tokenizer.pad, tokenizer.length)),
    "filled with 0": denoise(own, encoded(0, tokenizer.length)),
    f"window of {shortest}": denoise(own, encoded(tokenizer.pad, shortest)),
}
shares = {name: share(found) for name, found in windows.items()}
for name, found in windows.items():
    print(f"{name:14}: {shares[name]:4.0%} of the prompt; {(found - latents).abs().mean():.2f} from the right latents")
first, *others = shares.values()
assert first == 1
assert max(others) < 1
# A window that is too long is refused: the encoder has 64 places.
try:
    encoder(torch.full((1, 77), tokenizer.pad))
except pellucid.PellucidError as error:
    print("77 tokens:", error)

# %%
# **Another prediction type.** One word in ``scheduler_config.json``. Weights, shapes and speed are the same.
other = {}
for kind in ("epsilon", "sample"):
    changed = pellucid.Scheduler.from_config({**parts.scheduler, "prediction_type": kind})
    other[f"read as {kind}"] = denoise(changed, context)
# And the two texts in the wrong order, which guidance then pushes away from the prompt.
other["cond, uncond swapped"] = denoise(own, context.flip(0))
for name, found in other.items():
    fulfilled = share(found)
    print(f"{name:21}: {fulfilled:4.0%} of the prompt, spread {found.std():.2f} (right: {latents.std():.2f})")
    assert fulfilled < 0.5

# %%
# All of them ran without an error.
shown = {"by hand": latents, **dict(list(windows.items())[1:]), **other}
figure, row = plt.subplots(1, len(shown), figsize=(8.5, 2), layout="constrained")
for axis, (name, found) in zip(row, shown.items(), strict=True):
    axis.imshow(to_images(decoded(found))[0])
    axis.set_title(name, fontsize=7)
    axis.set_axis_off()

# %%
# Say it in an interview
# ----------------------
# "A text-to-image pipeline is five parts: tokenizer, text encoder, denoiser, scheduler, VAE. The tensors between them
# are token ids (B, 64), text states (B, 64, 128), and latents (B, 4, 16, 16), which are the state of the loop. Cond
# and uncond are stacked on the batch axis. Only the loop repeats, so it has the time, while weights and memory peaks
# may be elsewhere. The parts are independent, and that is the tradeoff: any can be replaced, and nothing but the
# configs says whether they fit – the prediction type, the window of the text, the scaling factor."
#
# Your turn
# ---------
# ``pellucid lab 06 --starter answer.py``, then ``pellucid lab 06 --check answer.py``.
#
# Further reading
# ---------------
# - :doc:`/pipelines` and :doc:`/inspect`: the same graph for any model, with shapes and bytes.
# - *High-Resolution Image Synthesis with Latent Diffusion Models*, Rombach, Blattmann, Lorenz, Esser, Ommer,
#   arXiv:2112.10752.
# - *Learning Transferable Visual Models From Natural Language Supervision*, Radford et al., arXiv:2103.00020: CLIP,
#   whose text encoder this is.
