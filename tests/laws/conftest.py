"""Lets the laws import how they measure by name, on one thread: small tensors gain nothing from two."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
