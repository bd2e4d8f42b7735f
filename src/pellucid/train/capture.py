"""A step as one CUDA graph: the GPU replays it without waiting for Python."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Asked = Sequence[Mapping[str, Tensor]]
WARM_UP = 3


class Captured:
    """`step(asked)`, captured. What it changes (`state`) is put back after the warm-up rounds, so that
    a captured run takes the same steps as any other."""

    def __init__(self, step: Callable[[Asked], tuple[Tensor, ...]], state: Callable[[], list[Tensor]]) -> None:
        self.step, self.state = step, state
        self.graph = torch.cuda.CUDAGraph()
        self.held: list[dict[str, Tensor]] = []
        self.out: tuple[Tensor, ...] = ()

    def __call__(self, asked: Asked) -> tuple[Tensor, ...]:
        for held, given in zip(self.held, asked, strict=True):
            for name, tensor in given.items():
                held[name].copy_(tensor, non_blocking=True)
        self.graph.replay()
        return tuple(tensor.clone() for tensor in self.out)

    def capture(self, asked: Asked) -> None:
        """Once, before the first call and before another thread uses the GPU."""
        if self.held:
            return
        self.held = [{name: tensor.cuda().clone() for name, tensor in part.items()} for part in asked]
        before = [tensor.clone() for tensor in self.state()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self.step(self.held)
        torch.cuda.current_stream().wait_stream(side)
        for tensor, value in zip(self.state(), before, strict=True):
            tensor.copy_(value)
        gc.collect()  # or the graph of a run that is over might be taken down within this capture
        # Other threads (the feed) may go on using the GPU: only what this one does is captured.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.out = self.step(self.held)
