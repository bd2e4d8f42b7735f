r"""
Lab 08: What a LoRA adds
========================

**Question.** A LoRA file of 0.3 MB gives a model of 12 MB a new style. What exactly is in it, where does it go, and
what do *rank*, *alpha* and *strength* mean?

**Handbook.** :doc:`/handbook/adapters`

**Mechanism.** A linear layer of the network has a weight :math:`W` of shape (out, in). A LoRA leaves it as it is and
learns two thin matrices beside it, :math:`A` (rank, in) and :math:`B` (out, rank):

.. math:: W' = W + s \cdot \frac{\alpha}{r} \, B A

:math:`r` is the rank, :math:`\alpha` a number that was fixed in training and belongs to the file, :math:`s` the
strength that you choose when you make an image. :math:`BA` has the shape of :math:`W` and the rank :math:`r`.
"""

import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from safetensors.torch import save_file

import pellucid
from pellucid import scenes
from pellucid.pipeline.images import to_tensor
from pellucid.labs import few
from pellucid.models import lora
from pellucid.pipeline.memory import size_text

pipe = pellucid.load("scenes-128")
options = {"sampler": "dpmpp_2m", "grid": "trailing", "steps": few(12, 4), "guidance": 4.0}

# %%
# The file
# --------
# `scenes-128/lora` was trained on pencil sketches, a style that the base was never shown. Each changed layer has two
# tensors: `lora_A`, which goes down to the rank, and `lora_B`, which comes up again.

style = pipe.load_lora("scenes-128/lora")
name = "unet.up_blocks.0.attentions.1.transformer_blocks.0.ff.net.2"
delta = style.layers[name]
B, A = delta.product.a.float(), delta.product.b.float()  # (out, r), (r, in)
W = pipe.components.network.get_submodule(name.removeprefix("unet.")).weight.detach()  # (out, in)
print(f"{len(style.layers)} layers of the UNet have a LoRA, {len(style.unused)} keys fit nothing")
print(f"{name}\n  W {tuple(W.shape)}, A {tuple(A.shape)}, B {tuple(B.shape)}, alpha / rank = {delta.factor:g}")

# %%
# By hand, and by the engine
# --------------------------
# One line of algebra is the whole method. `models.lora.apply` makes a *view* of the network: a twin that shares every
# tensor that the LoRA does not touch. Ours and the engine's weight of this layer are the same.

strength = 0.8
by_hand = W + strength * delta.factor * (B @ A)
view, receipt = lora.apply(pipe.components.network, [(style.adapters["unet"], strength)])
engine = view.get_submodule(name.removeprefix("unet.")).weight
apart = float((engine - by_hand).abs().max())
print(f"largest difference of the weights: {apart:.1e}")
print(receipt)
assert apart < 1e-6
assert view.conv_in.weight is pipe.components.network.conv_in.weight  # untouched: the same tensor, not a copy

# %%
# Rank and bytes
# --------------
# ΔW is a full matrix by its shape and a thin one by its content: after `rank` singular values there is nothing. W
# itself needs all of them. That is what the file saves: r·(in + out) numbers in the place of in·out.

of_delta, of_w = torch.linalg.svdvals(B @ A), torch.linalg.svdvals(W)
rank = int((of_delta > 1e-4 * of_delta[0]).sum())
thin, whole = A.numel() + B.numel(), W.numel()
print(f"rank of ΔW: {rank} of {min(W.shape)}; this layer: {thin:,} numbers in the place of {whole:,}")
numbers = sum(d.product.a.numel() + d.product.b.numel() for d in style.layers.values())
touched = sum(torch.Size(d.shape).numel() for d in style.layers.values())
print(f"all layers: {size_text(2 * numbers)} in float16, the weights that they change {size_text(2 * touched)}")
assert rank == delta.product.rank == 4

# %%
# The singular values of both.

fig, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
axis.semilogy(of_w, label="W")
axis.semilogy(of_delta.clamp(min=1e-6), label="ΔW = B·A", marker="o", markersize=3)
axis.set(xlabel="index", ylabel="singular value", title=f"W is {W.shape[0]} × {W.shape[1]}, its change has rank {rank}")
axis.legend()

# %%
# Strength
# --------
# The same prompts and seeds at several strengths. `scenes.style_of` reads the style from a finished image; the
# captions name none.

captions = [caption for caption, _ in scenes.prompts(few(6, 1), objects=1, seed=3)]
seeds = list(range(len(captions)))
strengths = (0.0, 1.0, 0.25, 0.5, 0.75, 1.5)[: few(6, 2)]
rows = {}
for s in sorted(strengths):
    loras = [pellucid.Lora(style, s)] if s else []
    rows[s] = pipe(captions, seed=seeds, loras=loras, **options)
    styles = scenes.style_of(to_tensor(rows[s].images))
    share = sum(found == "sketch" for found in styles) / len(styles)
    moved = float((rows[s].latents - rows[0.0].latents).square().mean().sqrt())
    print(f"strength {s:<4g}  sketches {share:4.0%}  latents moved by {moved:.2f}  {styles}")
assert scenes.style_of(to_tensor(rows[1.0].images)) == ["sketch"] * len(captions)

# %%
# The style does not come in evenly: the weights move along a straight line, the images do not.

fig, axes = plt.subplots(few(2, 1), len(rows), figsize=(7, 2.7), layout="constrained", squeeze=False)
for column, (s, made) in zip(axes.T, rows.items(), strict=True):
    for axis, image in zip(column, made.images, strict=False):
        axis.imshow(image)
        axis.axis("off")
    column[0].set_title(f"s = {s:g}", fontsize=10)

# %%
# Merged or beside
# ----------------
# A view makes new tensors for the changed layers at each request, and leaves the model alone: requests with other
# LoRAs run at the same time. A merge writes into the weights: nothing is made at a request, and all requests get it.
# The images are the same, and after the block the old weights are back, bit for bit.

before = lora.checksum(pipe.components.network.get_submodule(name.removeprefix("unet.")).weight)
with pipe.merge(pellucid.Lora(style, 1.0)):
    merged = pipe(captions, seed=seeds, **options)
after = lora.checksum(pipe.components.network.get_submodule(name.removeprefix("unet.")).weight)
apart = float((merged.latents - rows[1.0].latents).abs().max())
began = time.perf_counter()
lora.apply(pipe.components.network, [(style.adapters["unet"], 1.0)])
print(f"merged against a view: {apart:.1e}; restored: {before == after}")
print(f"making the view took {1000 * (time.perf_counter() - began):.0f} ms, once a request")
assert apart < 1e-4
assert before == after

# %%
# What to notice
# --------------
# - The network's code does not change, nor does the sampler, the schedule or the text encoder: only some weights do. A
#   plan that was made for the base is still right.
# - The strength multiplies ΔW, so a LoRA can be made weaker, stronger, negative, and several can be added: the order of
#   a sum does not matter.
# - Half the strength is not half the style. What is linear is W, and an image is not linear in W.
# - Rank bounds what a change can be; alpha / rank says how large the trainer meant it to be.
#
# What goes wrong
# ---------------
# **"alpha is a detail."** Many files keep B as it was trained and alpha beside it. Here is our LoRA in that dialect
# (kohya's), with alpha 1 at rank 4, so that B is four times as large. Read as it should be, it is the same LoRA.
# Whoever forgets alpha / rank applies it four times too strong.

folder = Path(tempfile.mkdtemp())
tensors = {}
for layer, d in style.layers.items():
    key = "lora_" + layer.replace(".", "_")
    up = d.product.a.float() * 4
    tensors[f"{key}.lora_up.weight"] = up.reshape(*up.shape, *(1,) * (d.product.b.ndim - 2)).contiguous()
    tensors[f"{key}.lora_down.weight"] = d.product.b.float().contiguous()
    tensors[f"{key}.alpha"] = torch.tensor(1.0)
save_file(tensors, folder / "kohya.safetensors")
save_file({k: t for k, t in tensors.items() if not k.endswith("alpha")}, folder / "forgotten.safetensors")
kohya, forgotten = (pipe.load_lora(folder / f"{file}.safetensors") for file in ("kohya", "forgotten"))
print(f"alpha / rank as read: {kohya.layers[name].factor:g}, and without alpha: {forgotten.layers[name].factor:g}")

# %%
# With alpha the latents are those of before. Without it there is no image left.

both = {"with alpha": kohya, "alpha forgotten": forgotten}
made = {title: pipe(captions, seed=seeds, loras=[pellucid.Lora(one)], **options) for title, one in both.items()}
apart = {n: float((m.latents - rows[1.0].latents).square().mean().sqrt()) for n, m in made.items()}
print({n: f"{value:.1e}" for n, value in apart.items()}, "rms, from the right latents")
assert apart["with alpha"] < 1e-3
assert apart["alpha forgotten"] > 0.5
fig, axes = plt.subplots(1, 3, figsize=(7, 2.5), layout="constrained")
shown = {"as meant": rows[1.0], **made}
for axis, (title, result) in zip(axes, shown.items(), strict=True):
    axis.imshow(result.images[0])
    axis.set_title(title, fontsize=9)
    axis.axis("off")

# %%
# **"It loaded, so it works."** A LoRA is matched to layers by the *names* of its keys. One whose names fit nothing
# changes nothing. A tool that skips unknown keys in silence then gives you the base's image. Ours refuses a file
# without a single match, and lists what it did not use of a file that fits in part.

misnamed = {key.replace("lora_unet_", "lora_net_"): tensor for key, tensor in tensors.items()}
save_file(misnamed, folder / "misnamed.safetensors")
try:
    pipe.load_lora(folder / "misnamed.safetensors")
    code = None
except pellucid.PellucidError as error:
    code = error.code
    print(f"error[{code}]: {error}")
assert code == "lora-nothing"

# %%
# A file that fits in part is used in part, and says so.

half = {key.replace("up_blocks", "high_blocks"): tensor for key, tensor in tensors.items()}
save_file(half, folder / "half.safetensors")
partly = pipe.load_lora(folder / "half.safetensors")
print(f"half of a LoRA: {len(partly.keys)} keys read, {len(partly.unused)} not used")
assert partly.unused

# %%
# **"Strength 0 is a LoRA that is off."** It is not an adapter at all, and asking for it is more often a slip of the
# hand than a wish: it is refused too, with the same code.

try:
    pipe(captions[0], seed=0, loras=[pellucid.Lora(style, 0.0)], **options)
    code = None
except pellucid.PellucidError as error:
    code = error.code
    print(f"error[{code}]: {error}")
assert code == "lora-nothing"

# %%
# Say it in an interview
# ----------------------
# "A LoRA is a low-rank difference of weights, W + s·(alpha/r)·B·A, layer by layer. B·A has the shape (out, in) of the
# weight and rank r, so the file holds r·(in + out) numbers per layer and not in·out. It lives in the weights: the
# latent, the plan and the number of model calls stay as they are. Merged it costs nothing at run time and serves all
# requests; kept beside, it costs r·(in + out) multiplications per token, or one new weight per request, and each
# request may have its own. When a LoRA 'does nothing' I look at the keys that were not matched; when it destroys
# images, at alpha / rank and the strength."
#
# Your turn
# ---------
# ``pellucid lab 08 --starter answer.py`` writes a file with gaps: the weight of a layer with a LoRA, its cost in
# numbers, and matching keys to layers. ``pellucid lab 08 --check answer.py`` says what is right.
#
# Further reading
# ---------------
# - Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models*, arXiv:2106.09685
# - Liu et al., *DoRA: Weight-Decomposed Low-Rank Adaptation*, arXiv:2402.09353
# - :doc:`/train_adapters`, :doc:`/pipelines`: how ours are trained, read and applied
