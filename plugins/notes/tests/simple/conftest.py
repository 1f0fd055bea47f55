"""A model of 16 tokens, and a backend for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rollouts.training import PyTorchTrainingBackend, grpo_loss


class Linear(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, width)
        self.head = nn.Linear(width, 16)

    def forward(self, input_ids):
        return self.head(self.table(input_ids))


@pytest.fixture
def backend_of(tmp_path):
    made = []

    def make(loss_fn=grpo_loss, model=None, lr=0.1, **settings):
        model = model or Linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        made.append(PyTorchTrainingBackend(model, optimizer, loss_fn, tmp_path, **settings))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
