r"""
Lab 07: Conditioning in UNet and DiT
====================================

**Question.** The denoiser gets the time and a text. Where do they enter a UNet, where a DiT, what does the network
read of them, and what does a token cost?

**Handbook.** :doc:`/handbook/backbone`

**Mechanism.** The time is one number for the whole image. It becomes a vector, and every block gets it: in a UNet as
a bias for each channel, in a DiT as shift, scale and gate around each norm (adaLN). The text is many vectors, and every
place of the image chooses among them. That is cross-attention:

.. math::

   \operatorname{softmax}\!\left(\frac{q k^\top}{\sqrt d}\right) v, \qquad
   q = W_q\,x_\text{place},\quad k, v = W_{k,v}\,\text{text}

The softmax is a matrix of places × words; its rows add up to 1.
"""

# %%
# Where they enter the UNet
# -------------------------
# Counted in the network itself: residual blocks that take the time, and blocks that attend to the text.
import time
from collections import Counter
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F

import pellucid
from pellucid import scenes
from pellucid.labs import few
from pellucid.models.attention import split_heads
from pellucid.models.dit import DiT, DiTConfig, PixArt, PixArtConfig
from pellucid.models.ops import residual
from pellucid.pipeline.encoders.text import encode_prompts

# %%
# The names are those of the weights: ``time_emb_proj`` for the time, ``attn2`` for the text.
pipe = pellucid.load("scenes-128")
parts, network, tokenizer = pipe.components, pipe.components.network, pipe.components.tokenizers[0]
timed = [name for name, module in network.named_modules() if name.endswith("time_emb_proj")]
blocks = network.cross_attentions()
sides = Counter(16 >> halvings for _, _, halvings in blocks)
print(f"{len(timed)} residual blocks take the time; {len(blocks)} blocks attend to the text, by side: {dict(sides)}")

# %%
# The time, as the network gets it
# --------------------------------
# A number from 0 to 999 becomes waves of many frequencies, and two layers turn them into a vector. Neighbouring times
# get similar vectors, distant ones do not: the network can interpolate, so it can be called at times it never saw.
times = torch.arange(0.0, 1000.0, 10.0)
with torch.no_grad():
    waves = network.sinusoid(times, network.config.block_out_channels[0])
    vectors = network.embed(times, None, None, None, None)
alike = F.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
axes[0].imshow(waves.T, aspect="auto", extent=(0, 1000, waves.shape[1], 0), cmap="gray")
axes[0].set(xlabel="time", ylabel="channel", title=f"{waves.shape[1]} waves per time")
drawn = axes[1].imshow(alike, extent=(0, 1000, 1000, 0))
axes[1].set(xlabel="time", ylabel="time", title="cosine of what the blocks get")
figure.colorbar(drawn)

# %%
# Does it need the time? A true image with noise of known size goes in, with the right time or a wrong one. The error of
# :math:`\hat x_0` is smallest at the true time, or next to it: the network uses the time.
batch = scenes.sample(torch.arange(4), seed=3)
with torch.no_grad():
    z = parts.vae.encode(scenes.render(batch, 128)).mean
    texts = encode_prompts(parts.text_encoders, parts.tokenizers, scenes.captions(batch, seed=0)).context
noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(0))

# %%
# Several times passed to the network, two true ones.
passed = torch.linspace(50, 950, few(10, 4))
errors = {}
for true in (350.0, 650.0):
    level = parts.schedule.level(true)
    x = level.alpha * z + level.sigma * noise
    with torch.no_grad():
        v = [network(x, t.expand(len(x)), texts) for t in passed]
    errors[true] = [float((level.alpha * x - level.sigma * out - z).pow(2).mean().sqrt()) for out in v]
    best = float(passed[int(np.argmin(errors[true]))])
    print(f"true time {true:g}: least error at {best:g}")
    assert abs(best - true) <= float(passed[1] - passed[0])

# %%
# The curves of both levels.
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for true, values in errors.items():
    (line,) = axis.plot(passed, values, marker="o", label=f"x is at time {true:g}")
    axis.axvline(true, color=line.get_color(), linestyle=":")
axis.set(xlabel="time passed to the network", ylabel="rms error of x0", title="The time matters")
axis.legend()

# %%
# The text, word by word
# ----------------------
# Hooks on the cross-attentions compute the weights again (the fast kernel never holds them), averaged over heads.
prompt = "a large red star left of a small blue ring on a white background"
maps = []


def watch(side):
    def hook(attention, given):
        q, k = (split_heads(part, attention.heads) for part in (attention.to_q(given[0]), attention.to_k(given[1])))
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)  # (1, heads, places, tokens)
        maps.append((side, weights.mean(1)[0]))

    return hook


hooks = [block.attn2.register_forward_pre_hook(watch(16 >> halvings)) for block, _, halvings in blocks]
options = {"sampler": "dpmpp_2m", "grid": "trailing", "steps": few(10, 5), "seed": 2, "guidance": 1.0}
made = pipe(prompt, **options)
for hook in hooks:
    hook.remove()
print(f"{len(maps)} maps of {made.plan.nfe} calls; the first is {tuple(maps[0][1].shape)}: (places, tokens)")

# %%
# The maps with a side of 16, averaged over blocks and steps, over the finished image. Nobody told the model where a
# star is; the places that became the star asked for the word.
weights = torch.stack([found for side, found in maps if side == 16]).mean(0)  # (256, 64)
words = [tokenizer.token(i) for i in tokenizer.encode(prompt)]
shown = ["red", "star", "blue", "ring", "white", "background"]
figure, row = plt.subplots(1, len(shown), figsize=(8.5, 2), layout="constrained")
for axis, word in zip(row, shown, strict=True):
    heat = weights[:, words.index(word)].reshape(1, 1, 16, 16)
    axis.imshow(made.images[0])
    axis.imshow(F.interpolate(heat, size=128, mode="bilinear")[0, 0], cmap="magma", alpha=0.65)
    axis.set_title(word, fontsize=9)
    axis.set_axis_off()

# %%
# In numbers: how much more a place in the red object attends to "red" than a place elsewhere, and the same for blue.
# And how the attention is shared out: most of it goes to the end token and its repetitions, which have read the whole
# text.
pixels = torch.tensor(np.array(made.images[0])).float() / 255
for word, channel, other in (("red", 0, 2), ("blue", 2, 0)):
    coloured = (pixels[..., channel] - pixels[..., other] > 0.3).float()
    inside = F.avg_pool2d(coloured[None, None], 8).flatten() > 0.5  # (256,)
    heat = weights[:, words.index(word)]
    print(f"{word}: {heat[inside].mean() / heat[~inside].mean():.1f} times the attention inside the {word} object")
    assert heat[inside].mean() > 1.5 * heat[~inside].mean()
last = words.index("<|endoftext|>")
print(f"words {weights[:, 1:last].sum(1).mean():.0%}, end and filling {weights[:, last:].sum(1).mean():.0%}")

# %%
# Where they enter a DiT
# ----------------------
# A DiT cuts the latents into patches and treats them as tokens. ``scenes-128``'s backbone is a UNet, so this one has
# random weights: its shapes and paths are those of any DiT. Time and class become one vector, and each block makes
# six of it: shift, scale and gate for the attention, and the same for the MLP. No token attends to the time.
torch.manual_seed(0)
shape = {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 4, "sample_size": 16, "patch_size": 2}
dit = DiT(DiTConfig(**shape, num_embeds_ada_norm=10)).eval()
seen = {}
first = dit.transformer_blocks[0]
spies = [
    dit.pos_embed.register_forward_hook(lambda module, given, out: seen.update(tokens=out)),
    first.norm1["linear"].register_forward_hook(lambda module, given, out: seen.update(modulation=out)),
]

# %%
# One call, with hooks on the patches and on the modulation of the first block.
x = torch.randn(1, 4, 16, 16)
with torch.no_grad():
    out = dit(x, torch.tensor([500.0]), labels=torch.tensor([3]))
for spy in spies:
    spy.remove()
print(f"latents {tuple(x.shape)} → tokens {tuple(seen['tokens'].shape)} → out {tuple(out.shape)}")
print(f"modulation of one block: {tuple(seen['modulation'].shape)} = 6 × {dit.config.width}")

# %%
# *adaLN-Zero*: training begins with all gates at zero, so that every block is the identity at first. A gate of zero
# lets nothing of the block through, whatever the block computes. A block returns the tokens after its attention, and
# what its MLP adds to them with its gate; ``residual`` is that sum.
tokens = seen["tokens"]


def block_output(modulation):
    with torch.no_grad():
        x, update = first(tokens, None, modulation.flatten(1))  # modulation (1, 6, D)
        return residual(x, update)


modulation = torch.randn(1, 6, dit.config.width)
open_gates = block_output(modulation)
modulation[:, [2, 5]] = 0.0  # both gates
closed = block_output(modulation)
moved, kept = ((found - tokens).abs().max() for found in (open_gates, closed))
print(f"open gates change the tokens by {moved:.2f}, closed ones by {kept:g}")
assert torch.equal(closed, tokens)

# %%
# PixArt is a DiT that also reads a text: the same cross-attention as in the UNet, between the two modulated parts. Its
# time makes one modulation for all blocks (adaLN-single); that saves parameters.
pixart = PixArt(PixArtConfig(**shape, out_channels=4, cross_attention_dim=128, caption_channels=128)).eval()
with torch.no_grad():
    out = pixart(x, torch.tensor([500.0]), texts[:1])
print(f"PixArt: latents {tuple(x.shape)}, text {tuple(texts[:1].shape)} → {tuple(out.shape)}")
for name, one in (("DiT", dit), ("PixArt", pixart)):
    count = sum(p.numel() for n, p in one.named_parameters() if "norm1" in n or "adaln" in n or "scale_shift" in n)
    print(f"{name}: {count:,} of {sum(p.numel() for p in one.parameters()):,} parameters make the modulation")

# %%
# What a token costs
# ------------------
# Twice the side is four times the tokens. Everything in a DiT but the attention grows with the tokens, the attention
# with their square. A UNet's upper level has attention over all places too; its convolutions grow with the area.
areas = [16, 32, 48, 64][: few(4, 2)]


def seconds(work):
    with torch.no_grad():
        taken = []
        for _ in range(few(4, 2)):
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
    return min(taken[1:])


# %%
# The same latents for both networks.
at, label = torch.tensor([500.0]), torch.tensor([3])
cost = {
    "DiT, patch 2": [seconds(lambda n=n: dit(torch.randn(1, 4, n, n), at, labels=label)) for n in areas],
    "UNet": [seconds(lambda n=n: network(torch.randn(1, 4, n, n), at, texts[:1])) for n in areas],
}
for n, a, b in zip(areas, *cost.values(), strict=True):
    print(
        f"{8 * n:3} pixels: {(n // 2) ** 2:4} tokens, DiT {1000 * a:5.1f} ms; UNet {n * n:4} places, {1000 * b:6.1f} ms"
    )

# %%
# On logarithmic axes the slope is the power.
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
for name, values in cost.items():
    axis.loglog([n * n for n in areas], [1000 * value for value in values], marker="o", label=name)
    slopes = [
        np.log(b / a) / np.log((m / n) ** 2) for (n, m), (a, b) in zip(pairwise(areas), pairwise(values), strict=True)
    ]
    print(f"{name}: time grows with the area to the power of", ", ".join(f"{slope:.2f}" for slope in slopes))
axis.set_xticks([n * n for n in areas], [str(n * n) for n in areas])
axis.set_xticks([], minor=True)
axis.set(xlabel="latent places (side squared)", ylabel="ms per call", title="Cost of a call")
axis.legend()

# %%
# What to notice
# --------------
# - Time: one vector, every block, every place alike. Text: many vectors, each place takes its own mixture.
# - The maps show *where* a word acts. They do not prove *why*: most of the attention goes to the end token.
# - Patch size is the cost knob of a DiT: twice the patch is a quarter of the tokens.

# %%
# What goes wrong
# ---------------
# **"The UNet reads the order of the words."** Cross-attention sees a set: the rows of the text in another order give
# the same image. The order was read by the text encoder. Shuffle the *words* and the relation is lost.
plan = pellucid.compile_plan("dpmpp_2m", schedule=parts.schedule, target="v", grid="trailing", steps=few(10, 6))


def latents_for(context):
    """A run with these text states, from the noise of one seed."""
    denoise = pellucid.denoiser(lambda x, t: network(x, t, context), parts.schedule, parts.target)
    with torch.no_grad():
        return pellucid.run(plan, denoise, shape=(4, 16, 16), seeds=2)


def encoded(text):
    return encode_prompts(parts.text_encoders, parts.tokenizers, [text]).context


order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
right = latents_for(encoded(prompt))
apart = float((latents_for(encoded(prompt)[:, order]) - right).abs().max())
print(f"rows of the text shuffled: the latents differ by {apart:.0e}")
assert apart < 1e-3

# %%
# **"It understands the sentence or it does not."** What is read can be found out by changing one thing: swap the
# colours, turn the words around, say nothing.
asked = scenes.parse(prompt)
texts_tried = {
    "as asked": prompt,
    "colours swapped": prompt.replace("red", "?").replace("blue", "red").replace("?", "blue"),
    "words backwards": " ".join(reversed(prompt.split())),
    "empty": "",
}

# %%
# The grade is against the prompt as asked; what differs is what the change touched.
shares, tried = {}, {}
for name, text in texts_tried.items():
    with torch.no_grad():
        tried[name] = parts.vae.decode(latents_for(encoded(text))).clamp(-1, 1)
    marks = scenes.grade(tried[name], [asked])[0].marks
    shares[name] = sum(mark.verdict == "right" for mark in marks) / len(marks)
    print(f"{name:15}: {shares[name]:4.0%}; not as asked:", [m.what for m in marks if m.verdict != "right"])
assert shares["as asked"] == 1
assert shares["empty"] < 0.5
assert max(shares["colours swapped"], shares["words backwards"]) < 1

# %%
# The four images.
figure, row = plt.subplots(1, 4, figsize=(8, 2.2), layout="constrained")
for axis, (name, found) in zip(row, tried.items(), strict=True):
    axis.imshow(((found[0] + 1) / 2).permute(1, 2, 0))
    axis.set_title(f"{name}: {shares[name]:.0%}", fontsize=9)
    axis.set_axis_off()

# %%
# **"DiT is another kind of diffusion."** It is another network. The target is made from x0 and noise before any network
# is asked, and the loss is the same line for both; so is the plan that samples from them.
level = parts.schedule.level(500.0)
target = level.alpha * noise - level.sigma * z
x = level.alpha * z + level.sigma * noise
at, labels = torch.full((4,), 500.0), torch.zeros(4, dtype=torch.long)
networks = {"UNet": lambda x, t: network(x, t, texts[: len(x)]), "DiT": lambda x, t: dit(x, t, labels=labels[: len(x)])}
for name, one in networks.items():
    with torch.no_grad():
        loss = F.mse_loss(one(x, at), target)
        end = pellucid.run(plan, pellucid.denoiser(one, parts.schedule, "v"), shape=(4, 16, 16), seeds=2)
    print(f"{name:4}: loss {loss:.3f} (trained or not), and the plan of {plan.nfe} rows runs it to {tuple(end.shape)}")
    assert end.shape == (1, 4, 16, 16)

# %%
# Say it in an interview
# ----------------------
# "Two kinds of condition enter a denoiser. A global one, the time (and a class, or pooled text), becomes a vector per
# image, (B, E); a UNet adds it to the channels of every residual block, a DiT turns it into shift, scale and gate of
# every block: adaLN. A sequence, the text (B, 64, 128), enters by cross-attention: queries from the places, keys and
# values from the words, weights of (places × words). Cross-attention has no order; the text encoder has. The backbone
# is a choice of architecture, not of objective: target, schedule and sampler stay. The tradeoff is in the tokens: a
# DiT's attention grows with the square of (H/16)·(W/16) at patch 2; a UNet pays by level and keeps the locality of
# convolutions."
#
# Your turn
# ---------
# ``pellucid lab 07 --starter answer.py``, then ``pellucid lab 07 --check answer.py``.
#
# Further reading
# ---------------
# - *Scalable Diffusion Models with Transformers*, Peebles, Xie, arXiv:2212.09748: DiT and adaLN-Zero.
# - *PixArt-α: Fast Training of Diffusion Transformer for Photorealistic Text-to-Image Synthesis*, Chen et al.,
#   arXiv:2310.00426: adaLN-single.
# - *High-Resolution Image Synthesis with Latent Diffusion Models*, Rombach, Blattmann, Lorenz, Esser, Ommer,
#   arXiv:2112.10752: cross-attention in a UNet.
# - *Prompt-to-Prompt Image Editing with Cross Attention Control*, Hertz et al., arXiv:2208.01626: what maps are good
#   for.
