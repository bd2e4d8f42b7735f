import torch

torch.set_num_threads(1)  # pytest runs two workers; small tensors gain nothing from threads
