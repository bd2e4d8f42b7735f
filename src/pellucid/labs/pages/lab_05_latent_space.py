r"""
Lab 05: Latent space
====================

**Question.** What does the autoencoder keep of an image, what do its latents allow and not allow, and what does the
way back to pixels cost beside the denoiser?

**Handbook.** :doc:`/handbook/vae`

**Mechanism.** The encoder maps an image to a Gaussian over latents, the decoder maps latents to an image:

.. math::

   (3, 128, 128) \;\to\; \mu, \sigma_\text{post} : (4, 16, 16), \qquad z = (\mu + \sigma_\text{post}\,\xi - b)\cdot s

Diffusion happens to z. The scaling factor s (and the shift b, where there is one) brings the latents to about unit
spread, because the noise schedule was made for data of that size. Before decoding it is taken out again: z / s + b.
"""

# %%
# Shapes
# ------
# True scenes go through the encoder. Eight pixels per side become one latent; three channels become four.
import copy
import math
import time
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

import pellucid
from pellucid import scenes
from pellucid.labs import few
from pellucid.models.vae import from_diffusion, to_diffusion
from pellucid.pipeline.memory import size_text, predict, request_for
from pellucid.pipeline.encoders.text import encode_prompts

# %%
# The mean of the Gaussian is its mode; what follows takes it where nothing else is said.
pipe = pellucid.load("scenes-128")
parts, vae = pipe.components, pipe.components.vae
batch = scenes.sample(torch.arange(few(8, 2)), seed=1)
images = scenes.render(batch, 128)  # in [−1, 1]
with torch.no_grad():
    posterior = vae.encode(images)
z = posterior.mean
print(f"images {tuple(images.shape)} → latents {tuple(z.shape)}: {images[0].numel() // z[0].numel()} times fewer")
print(
    f"spread of the latents {z.std():.2f}; scaling factor {vae.config.scaling_factor}, shift {vae.config.shift_factor}"
)

# %%
# The round trip
# --------------
# Decoded again, the image is not the same: the decibels say by how much (peak 2, since pixels go from −1 to 1).
# What the autoencoder loses, no denoiser brings back: it is the ceiling of the whole model. The reader still reads
# all of it.


def decibels(a, b):
    """PSNR of each image, averaged."""
    return float((10 * torch.log10(4 / (a.clamp(-1, 1) - b).pow(2).mean((1, 2, 3)))).mean())


def decode(latents):
    with torch.no_grad():
        return vae.decode(latents)


back = decode(z)
queries = [query for _, query in scenes.described(batch, full=True)]
right = sum(grade.right for grade in scenes.grade(back.clamp(-1, 1), queries))
print(f"round trip: {decibels(back, images):.1f} dB; {right} of {len(queries)} read right")
assert decibels(back, images) > 35

# %%
# The latents are spatial: the object is where it is in the image. No channel is red, green or blue.
figure, grid = plt.subplots(2, 6, figsize=(8, 3), layout="constrained")
for line in range(2):
    shown = [images[line], back[line], *z[line]]
    names = ["image", "round trip", *(f"latent {k}" for k in range(4))]
    for axis, one, name in zip(grid[line], shown, names, strict=True):
        flat = one.ndim == 2
        axis.imshow(one if flat else ((one.clamp(-1, 1) + 1) / 2).permute(1, 2, 0), cmap="gray" if flat else None)
        axis.set_title(name, fontsize=9)
        axis.set_axis_off()

# %%
# A Gaussian, and how wide it is
# ------------------------------
# The encoder also says how sure it is. Training samples from it, so that the decoder gets used to small errors in z;
# then noise of that size costs next to nothing, and larger noise shows how the image depends on it.
wide = float(torch.exp(0.5 * posterior.logvar).mean())
draw = torch.Generator().manual_seed(0)
noise = torch.randn(z.shape, generator=draw)
sampled = decibels(decode(posterior.sample(noise)), images)
print(f"posterior: standard deviation {wide:.3f} beside a spread of {z.std():.2f}")
print(f"mode {decibels(back, images):.1f} dB, a sample {sampled:.1f} dB")
for size in (0.1, 0.3, 1.0):
    print(f"noise of {size:g} on z: {decibels(decode(z + size * noise), images):.1f} dB")
assert abs(sampled - decibels(back, images)) < 1

# %%
# Between two latents
# -------------------
# Two images of one prompt. Halfway between their *latents* is close to halfway between their pixels: two ghosts. The
# latent space of a diffusion model is a smaller image, not a space of ideas. Halfway between their *noises*, on the
# sphere where noise lives, the sampler makes an image like any other.
ends = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(3))
angle = math.acos(float((ends[0] * ends[1]).sum() / ends[0].norm() / ends[1].norm()))
shares = torch.linspace(0, 1, few(5, 3)).tolist()
arcs = [(math.sin((1 - w) * angle) * ends[0] + math.sin(w * angle) * ends[1]) / math.sin(angle) for w in shares]
options = {
    "sampler": "dpmpp_2m",
    "grid": "trailing",
    "steps": few(10, 6),
    "guidance": 2.0,
    "seed": list(range(len(arcs))),
}
made = pipe(["a large red star on a white background"] * len(arcs), latents=torch.stack(arcs), **options)
between = torch.stack([torch.lerp(made.latents[0], made.latents[-1], w) for w in shares])
rows = {"latents": decode(between), "noises": decode(made.latents)}

# %%
# The reader tells the ghosts from the images.
figure, grid = plt.subplots(2, len(shares), figsize=(8, 3.6), layout="constrained")
for line, (name, pixels) in enumerate(rows.items()):
    for axis, one, w in zip(grid[line], pixels, shares, strict=True):
        axis.imshow(((one.clamp(-1, 1) + 1) / 2).permute(1, 2, 0))
        axis.set_title(f"{name}, {w:.2f}", fontsize=9)
        axis.set_axis_off()
readable = {name: [found.readable for found in scenes.read(pixels.clamp(-1, 1))] for name, pixels in rows.items()}
print(readable)
middle = len(shares) // 2
assert readable["noises"][middle] and not readable["latents"][middle]

# %%
# What it costs
# -------------
# One call of the denoiser against one decoding, at three sizes, and the bytes that live at the peak of each stage. The
# decoder works at full resolution with many channels; the denoiser on 64 times fewer places, but many times over.
context = encode_prompts(parts.text_encoders, parts.tokenizers, [""]).context


def seconds(work):
    """The fastest of a few runs, after one to warm up."""
    with torch.no_grad():
        taken = []
        for _ in range(few(6, 2)):
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
    return min(taken[1:])


sides = [16, 24, 32][: few(3, 2)]
calls = [seconds(lambda n=n: parts.network(torch.randn(1, 4, n, n), torch.tensor([500.0]), context)) for n in sides]
decodes = [seconds(lambda n=n: vae.decode(torch.randn(1, 4, n, n))) for n in sides]
for n, call, one in zip(sides, calls, decodes, strict=True):
    print(f"{8 * n}×{8 * n} pixels: one call {1000 * call:.0f} ms, decoding {1000 * one:.0f} ms")

# %%
# Memory is predicted by a rehearsal of the pipeline without data; ``pellucid memory`` says how good that is.
forecast = predict(pipe, request_for(pipe, size=(128, 128), batch=1)).stages
figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
axes[0].bar(list(forecast), [peak.activations / 2**20 for peak in forecast.values()])
axes[0].set(ylabel="MiB of activations at the peak", title="128×128, one image")
axes[1].plot([8 * n for n in sides], [1000 * c for c in calls], marker="o", label="one denoiser call")
axes[1].plot([8 * n for n in sides], [1000 * d for d in decodes], marker="o", label="decoding")
axes[1].set(xlabel="pixels per side", ylabel="ms", title="Time")
axes[1].legend()
for name in ("denoise", "decode"):
    print(f"{name}: {size_text(forecast[name].activations)} of activations, owned by {forecast[name].owner}")

# %%
# What to notice
# --------------
# - 48 times fewer numbers, and the images still read right: that is what makes twenty calls of the denoiser cheap.
# - The decoder runs once, but at full resolution. It, not the loop, owns the peak of the memory here.
# - The latents have about unit spread, which is why this model needs no scaling factor: it was trained to have it.

# %%
# What goes wrong
# ---------------
# **The scaling factor forgotten.** Our factor is 1, so that forgetting it does nothing. Stable Diffusion's is
# 0.18215. Here is our VAE written as one with larger latents: the last layer of the encoder times 1/0.18215, the
# first of the decoder divided by it. It is the same autoencoder, and its config must say so.
factor = 0.18215
large = copy.deepcopy(vae)
large.config = replace(vae.config, scaling_factor=factor)
with torch.no_grad():
    large.quant_conv.weight[:4] /= factor
    large.quant_conv.bias[:4] /= factor
    large.post_quant_conv.weight *= factor
    raw = large.encode(images).mean
    scaled = to_diffusion(large.config, raw)
    kept = decibels(large.decode(from_diffusion(large.config, scaled)), images)
    forgotten = decibels(large.decode(scaled), images)
print(f"raw spread {raw.std():.2f}, scaled {scaled.std():.2f}; scaled equals ours to {(scaled - z).abs().max():.1e}")
print(f"decoded with the factor {kept:.1f} dB, without it {forgotten:.1f} dB")
assert kept > 35
assert forgotten < 25

# %%
# On the way in it is worse to see: at a level of the schedule, noise of the right size on latents that are 5.5 times
# too large is hardly any noise. The signal-to-noise ratio that the time stands for is wrong by the square.
level = parts.schedule.level(700.0)
print(
    f"SNR of the time {(level.alpha / level.sigma) ** 2:.3f}; real {(level.alpha * raw.std() / level.sigma) ** 2:.3f}"
)
assert (raw.std() / scaled.std()) ** 2 > 20

# %%
# **Noise put on pixels.** "The forward process adds noise to the image": in latent diffusion it adds it to z. Noise
# on the pixels and then the encoder gives latents that no training step has ever shown: the encoder never saw noise,
# and it is not linear. The network's x0 from one step, decoded, says how much that matters.
level = parts.schedule.level(400.0)
texts = encode_prompts(parts.text_encoders, parts.tokenizers, scenes.captions(batch, seed=0)).context
with torch.no_grad():
    on_pixels = vae.encode(level.alpha * images + level.sigma * torch.randn(images.shape, generator=draw)).mean
    x = {"noise on latents": level.alpha * z + level.sigma * noise, "noise on pixels": on_pixels}
    times = torch.full((len(z),), 400.0)
    x0 = {name: level.alpha * one - level.sigma * parts.network(one, times, texts) for name, one in x.items()}

# %%
# The second image, both ways.
figure, grid = plt.subplots(1, 4, figsize=(8, 2.4), layout="constrained")
for k, name in enumerate(x):
    for axis, latents, what in ((grid[2 * k], x[name], name), (grid[2 * k + 1], x0[name], "its x0")):
        axis.imshow(((decode(latents[1:2])[0].clamp(-1, 1) + 1) / 2).permute(1, 2, 0))
        axis.set_title(what, fontsize=9)
        axis.set_axis_off()
good, bad = (decibels(decode(one), images) for one in x0.values())
print(f"x0 of one step: {good:.1f} dB from noise on latents, {bad:.1f} dB from noise on pixels")
assert good > bad + 1

# %%
# **"With latents, nothing costs as much as pixels."** The peak of the memory is in the decoder, and one decoding takes
# longer than one call of the denoiser. It is paid once; at large sizes it is what runs out of memory.
ratio = forecast["decode"].activations / forecast["denoise"].activations
print(f"decoding: {decodes[0] / calls[0]:.1f} calls long, {ratio:.1f} times the activations")
assert ratio > 1

# %%
# Say it in an interview
# ----------------------
# "The state of latent diffusion is z, (B, 4, H/8, W/8), scaled to about unit spread. The VAE is outside of the loop:
# it encodes once for image-to-image, decodes once at the end. Its round trip, in decibels at the top of this page,
# bounds the quality of every image. The tradeoff: 48 times fewer numbers per step against a lossy end and a decoder
# that owns the memory peak; tiling and slicing are for that. Two things I check in new code: the scaling factor on
# both ways, and that noise is added after the encoder."
#
# Your turn
# ---------
# ``pellucid lab 05 --starter answer.py``, then ``pellucid lab 05 --check answer.py``.
#
# Further reading
# ---------------
# - *High-Resolution Image Synthesis with Latent Diffusion Models*, Rombach, Blattmann, Lorenz, Esser, Ommer,
#   arXiv:2112.10752.
# - *Auto-Encoding Variational Bayes*, Kingma, Welling, arXiv:1312.6114.
# - :doc:`/memory`: tiles and slices; :doc:`lab 10 <lab_10_memory>` measures them.
