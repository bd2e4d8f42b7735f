"""AdamW with its rate, and running means of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pellucid.core.errors import PellucidError, rule
from pellucid.train.config import OptimizerConfig

# --- AdamW ----------------------------------------------------------------------------------------------------------


def build(network: nn.Module, config: OptimizerConfig, *, capture: bool = False) -> torch.optim.AdamW:
    """AdamW over what is trained, with its moments made now: a checkpoint then has the same names at every step.

    Biases, norms and other vectors are not decayed.
    """
    trained = [p for p in network.parameters() if p.requires_grad]
    if not trained:
        raise PellucidError("network must have parameters to train; got none.", "nothing-to-train")
    on_gpu = trained[0].device.type == "cuda"
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    made = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=torch.tensor(config.rate, device=trained[0].device) if capture else config.rate,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=on_gpu,
        foreach=None if on_gpu else True,
        capturable=capture,
    )
    for p in trained:
        made.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device if on_gpu else "cpu"),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return made


def rate_at(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of a step, counted from 0: a linear rise, then what `decay` says."""
    rise = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    if config.decay == "constant" or step < config.warmup:
        return config.rate * rise
    part = (step - config.warmup) / max(1, steps - config.warmup)
    return config.rate * 0.5 * (1.0 + math.cos(math.pi * min(part, 1.0)))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def state(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The moments of each trained parameter, by the parameter's name."""
    held = {}
    for name, parameter in network.named_parameters():
        for key, tensor in optimizer.state.get(parameter, {}).items():
            held[f"{name}/{key}"] = tensor
    return held


# --- Running means of weights ---------------------------------------------------------------------------------------


class EMA:
    """For each length, the mean of a network's weights over the past, each image counting half as much a length later.

    A length is a number of images, so that it means the same at any batch size. The means start with the first update,
    and are corrected for their short past: early on they are means of what there is, not of the random start. Where
    ranks hold shares of the weights (DTensors), each keeps the means of its own.
    """

    def __init__(self, network: nn.Module, lengths: Iterable[float]) -> None:
        self.lengths = tuple(float(length) for length in lengths)
        if not self.lengths or any(not (math.isfinite(n) and n > 0) for n in self.lengths):
            raise PellucidError(rule("EMA lengths", "at least one number of images above 0", self.lengths), "ema")
        if len(set(self.lengths)) != len(self.lengths):
            raise PellucidError(rule("EMA lengths", "different", self.lengths), "ema")
        self.seen = 0  # images
        self.network, self.now = network, dict(floats(network))  # listed once: a step has no time for it
        self.means = {
            n: {k: torch.zeros_like(v, dtype=torch.float32) for k, v in self.now.items()} for n in self.lengths
        }

    @torch.no_grad()
    def update(self, images: int) -> None:
        """Adds the weights after a step over `images` images."""
        if images < 1:
            raise PellucidError(rule("images", "at least 1", images), "ema")
        self.seen += images
        weights = [local(tensor).float() for tensor in self.now.values()]
        for length, held in self.means.items():
            torch._foreach_lerp_([local(mean) for mean in held.values()], weights, self.share(length, images))

    def share(self, length: float, images: int) -> float:
        """What the newest weights count: (1 − ½^(images / length)), over the sum of all that has counted so far."""
        return -math.expm1(-images / length * math.log(2)) / -math.expm1(-self.seen / length * math.log(2))

    def weights(self, length: float) -> dict[str, Tensor]:
        if length not in self.means:
            raise PellucidError(rule("EMA length", f"one of {self.lengths}", length), "ema")
        return self.means[length]

    @contextmanager
    def inside(self, length: float) -> Iterator[nn.Module]:
        """The network with the means for its weights, until the end of the block."""
        means = self.weights(length)
        kept = {name: tensor.detach().clone() for name, tensor in self.now.items()}
        try:
            with torch.no_grad():
                for name, tensor in self.now.items():
                    local(tensor).copy_(local(means[name]))
            yield self.network
        finally:
            with torch.no_grad():
                for name, tensor in self.now.items():
                    local(tensor).copy_(local(kept[name]))

    def state(self) -> dict[str, Tensor]:
        """All of it as tensors, for a checkpoint."""
        held = {f"{length!r}/{name}": tensor for length, means in self.means.items() for name, tensor in means.items()}
        return {"seen": torch.tensor(self.seen, dtype=torch.int64), **held}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Back from a checkpoint of the same network and lengths."""
        wanted = self.state()
        if set(state) != set(wanted):
            odd = sorted(set(state) ^ set(wanted))
            raise PellucidError(rule("EMA state", "of this network and these lengths", odd[:3]), "ema-state")
        self.seen = int(state["seen"])
        for name, tensor in wanted.items():
            if name != "seen":
                local(tensor).copy_(local(state[name]))


def floats(network: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers that are numbers to average."""
    return [(name, tensor) for name, tensor in network.state_dict(keep_vars=True).items() if tensor.is_floating_point()]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
