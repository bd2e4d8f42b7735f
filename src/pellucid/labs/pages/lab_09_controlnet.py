r"""
Lab 09: An image that steers
=============================

**Question.** How does an edge map get into a UNet that was trained without one, why does a new ControlNet change
nothing, and how well does a trained one follow?

**Handbook.** :doc:`/handbook/adapters`

**Mechanism.** A ControlNet is a copy of the UNet's first half. A small stack of convolutions :math:`h` brings the
image :math:`c` down to the size of the latents, where it is added to the copy's first features. What comes out of
every block goes through a 1×1 convolution :math:`Z_k` and is added to the skip :math:`k` of the frozen UNet:

.. math:: \text{skip}_k' = \text{skip}_k + s \cdot Z_k\big(\text{copy}_k(\text{conv}(x) + h(c),\, t,\, \text{text})\big)

The :math:`Z_k` begin at zero. :math:`s` is the strength. The latent :math:`x` itself never meets the image.
"""

import matplotlib.pyplot as plt
import torch

import pellucid
from pellucid import scenes
from pellucid.pipeline.images import to_tensor
from pellucid.labs import few
from pellucid.models.controlnet import ControlNet

pipe = pellucid.load("scenes-128")
options = {"sampler": "dpmpp_2m", "grid": "trailing", "steps": few(10, 3), "guidance": few(4, 1)}

# %%
# Scenes with their exact outlines
# --------------------------------
# `scenes.edges` draws the outline of every thing from its formula. No detector guesses it, so an image can be measured
# against it: `scenes.edge_f1` is the F1 of the outlines in an image, within one pixel.

count = few(3, 1)
drawn = scenes.sample(torch.arange(1, count + 1), seed=5, split="held_out", styles=("flat",), objects=(2,))
described = scenes.described(drawn, 5, full=True, style=False)
captions = [caption for caption, _ in described]
edges = scenes.edges(drawn)  # (B, 1, 128, 128) in [0, 1], white on black
seeds = list(range(count))
print(captions[0], tuple(edges.shape))


def f1(made, against=edges):
    """The mean F1 of the outlines of images."""
    return float(scenes.edge_f1(to_tensor(made.images), against).mean())


# %%
# The hint's path
# ---------------
# Three convolutions of stride 2 take 128 pixels to 16, the side of the latents. This is done once a run: the image
# does not change from step to step. The VAE has no part in it.

network = pipe.controlnet_of(pellucid.Control("scenes-128/controlnet", edges))
h = edges.expand(-1, 3, -1, -1)
embedding = network.controlnet_cond_embedding
with torch.no_grad():
    for conv in (embedding.conv_in, *embedding.blocks, embedding.conv_out):
        h = torch.nn.functional.silu(conv(h)) if conv is not embedding.conv_out else conv(h)
        print(f"  {tuple(conv.weight.shape)!s:<16} stride {conv.stride[0]} -> {tuple(h.shape)[1:]}")
    hint = network.hint(edges.expand(-1, 3, -1, -1), [1.0] * count)
assert torch.allclose(h, hint.embedded, atol=1e-5)

# %%
# What is added, block by block
# -----------------------------
# A hook on the ControlNet shows what it hands to the UNet in a real run: one tensor a skip, and one for the middle.
# Cond and uncond are one batch, so its first axis is twice the number of images.

told = []
hook = network.register_forward_hook(lambda module, inputs, out: told.append([*out[0], out[1]]))
controlled = pipe(captions, seed=seeds, controls=[pellucid.Control(network, edges)], **options)
hook.remove()
names = [f"skip {k}" for k in range(len(told[0]) - 1)] + ["middle"]
for name, first, last in zip(names, told[0], told[-1], strict=True):
    sizes = [float(one.square().mean().sqrt()) for one in (first, last)]
    print(f"  {name:<7} {tuple(first.shape)!s:<18} rms {sizes[0]:.3f} at the first step, {sizes[1]:.3f} at the last")
assert len(told) == controlled.plan.nfe

# %%
# A new ControlNet changes nothing
# --------------------------------
# Its last convolutions are zero, so every residual is zero and the first loss of training is that of the base. It can
# learn all the same: the gradient of a zero convolution is what came into it, which is not zero.

fresh = ControlNet(network.config).eval()
base = pipe(captions, seed=seeds, **options)
unchanged = pipe(captions, seed=seeds, controls=[pellucid.Control(fresh, edges)], **options)
moved = float((unchanged.latents - base.latents).abs().max())  # of rounding at most, about 1e-6 of the latents
print("latents moved by", moved)
zero = fresh.controlnet_mid_block
zero(torch.randn(1, zero.in_channels, 4, 4)).square().sum().backward()
flat = float(zero.weight.grad.abs().max())
(zero(torch.ones(1, zero.in_channels, 4, 4)) - 1).square().sum().backward()
print(f"gradient where the loss is already least: {flat:g}; where it is not: {float(zero.weight.grad.abs().max()):g}")
assert moved <= 1e-5 * float(base.latents.abs().max())
assert float(zero.weight.grad.abs().max()) > 0

# %%
# How well it follows
# -------------------
# The same seeds at several strengths, with the caption and with an empty prompt.

strengths = (0.0, 1.0, 0.1, 0.25, 0.5)[: few(5, 2)]
followed = {"caption": {}, "empty prompt": {}}
images = {}
for prompt, scores in followed.items():
    texts = captions if prompt == "caption" else [""] * count
    for s in sorted(strengths):
        made = pipe(texts, seed=seeds, controls=[pellucid.Control(network, edges, scale=s)], **options)
        scores[s], images[prompt, s] = f1(made), made
    print(f"{prompt:<13}" + "  ".join(f"s = {s:g}: {score:.3f}" for s, score in scores.items()))
assert min(scores[1.0] for scores in followed.values()) > 0.8 > 0.4 > followed["caption"][0.0]

# %%
# The outlines do not need the words. There is a threshold, and after it more strength brings nothing.

fig, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for prompt, scores in followed.items():
    axis.plot(list(scores), list(scores.values()), marker="o", label=prompt)
axis.set(xlabel="strength of the ControlNet", ylabel="F1 of the outlines", ylim=(0, 1.05), title="Following the edges")
axis.legend()

# %%
# Words are needed for everything that an outline does not say. `scenes.grade` reads colours: with the caption they are
# those that were asked for.

for prompt in followed:
    grades = scenes.grade(to_tensor(images[prompt, 1.0].images), [query for _, query in described])
    share = sum(grade.share("colour") for grade in grades) / count
    print(f"{prompt:<13} colours right: {share:.0%}")

# %%
# The same seed four times.

made = {"with the caption": images["caption", 1.0], "without words": images["empty prompt", 1.0]}
shown = {"edges": edges[0, 0], "base": base.images[0], **{title: one.images[0] for title, one in made.items()}}
fig, axes = plt.subplots(1, 4, figsize=(7, 2.1), layout="constrained")
for axis, (title, image) in zip(axes, shown.items(), strict=True):
    axis.imshow(image, cmap="grey")
    axis.set_title(title, fontsize=9)
    axis.axis("off")

# %%
# When it matters
# ---------------
# Where things stand is decided while the image is mostly noise. A ControlNet that acts in the first half of the run
# does nearly all of its work; one that comes in the second half comes too late.

halves = {"first half": (0.0, 0.5), "second half": (0.5, 1.0)}
late = {}
for name, (start, end) in halves.items():
    control = pellucid.Control(network, edges, start=start, end=end)
    late[name] = f1(pipe(captions, seed=seeds, controls=[control], **options))
    print(f"{name:<12} F1 {late[name]:.3f}")
assert late["first half"] > late["second half"] + 0.2

# %%
# What to notice
# --------------
# - The state x, the plan and the number of calls of the UNet are those of a run without it. What grows is the work of a
#   call: half a UNet more.
# - Residuals enter at the skips and in the middle, at several sizes: (80, 16, 16) says where to 8 pixels, (96, 8, 8) to
#   16. That outlines are right to a pixel is the work of the latents' channels and the VAE.
# - Strength multiplies features, not pixels. Half of it is not "half as near to the edges".
#
# What goes wrong
# ---------------
# **"Edges are edges."** The image must look as it did in training: white lines on black. Inverted, it holds the same
# information, and the network has never seen it.

inverted = f1(pipe(captions, seed=seeds, controls=[pellucid.Control(network, 1 - edges)], **options))
print(f"F1 with black lines on white {inverted:.3f}, as trained {followed['caption'][1.0]:.3f}")
assert inverted < 0.5

# %%
# **"It will find the right place."** It follows the pixels that it is given. A hint that is moved by 16 pixels, as
# happens when an image is cropped or padded and its edges are not, gives an image whose outlines are right for the
# *moved* map.

moved = edges.roll(16, dims=-1)
shifted = pipe(captions, seed=seeds, controls=[pellucid.Control(network, moved)], **options)
print(f"F1 against the moved edges {f1(shifted, moved):.3f}, against the scene {f1(shifted):.3f}")
assert f1(shifted, moved) > f1(shifted) + 0.3

# %%
# **"It is img2img with a sketch."** img2img encodes an image with the VAE, adds noise and begins there, so that its
# *colours* are where the run starts. Of a sketch, black with white lines, little strength leaves just that, and much of
# it forgets where the lines were. At no strength are the outlines followed and the caption right.

sketch = edges.expand(-1, 3, -1, -1)
rows = {s: pipe(captions, seed=seeds, image=sketch, strength=s, **options) for s in (0.3, 0.9)}
for s, made in rows.items():
    right = sum(grade.right for grade in scenes.grade(to_tensor(made.images), [query for _, query in described]))
    bright = float(to_tensor(made.images).mean())
    print(f"img2img at {s:g}: F1 {f1(made):.3f}, {right} of {count} captions right, mean of the pixels {bright:+.2f}")
    assert f1(made) < 0.8 or right < count

# %%
# The three failures, beside what was wanted.

shown = {"ControlNet": controlled, "hint moved": shifted, **{f"img2img {s:g}": made for s, made in rows.items()}}
fig, axes = plt.subplots(1, 4, figsize=(7, 2.1), layout="constrained")
for axis, (title, made) in zip(axes, shown.items(), strict=True):
    axis.imshow(made.images[0])
    axis.set_title(title, fontsize=9)
    axis.axis("off")

# %%
# Say it in an interview
# ----------------------
# "A ControlNet is a trainable copy of the UNet's encoder that takes the latent x (B, 4, h, w), the time, the text, and
# an image at eight times the side, which a few strided convolutions bring to h × w. It returns one residual for each
# skip, of the skip's shape (B, C_k, h_k, w_k), and one for the middle block. The last 1×1 convolutions start at zero,
# so training begins at the base. It steers layout and costs half a UNet more a call; it can be switched off after the
# first half of the run, since layout is decided at high noise. It is not img2img: no latent of the image exists, and
# the run starts from pure noise."
#
# Your turn
# ---------
# ``pellucid lab 09 --starter answer.py``: a zero convolution, adding residuals to skips, when a control acts, and the
# F1 of outlines. Then ``pellucid lab 09 --check answer.py``.
#
# Further reading
# ---------------
# - Zhang, Rao and Agrawala, *Adding Conditional Control to Text-to-Image Diffusion Models*, arXiv:2302.05543
# - :doc:`/adherence`: how adapters are measured, :doc:`/train_adapters`: how this one was trained
