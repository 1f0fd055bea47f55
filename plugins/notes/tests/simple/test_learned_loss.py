"""A loss function with parameters of its own, which the optimizer trains with the model."""

from __future__ import annotations

import torch
import trio

from rollouts.training import PyTorchTrainingBackend, grpo_loss

from .conftest import Linear


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, logits, labels, loss_mask, advantages):
        return self.scale * grpo_loss(logits, labels, loss_mask, advantages)


def backend(loss_fn, folder):
    model = Linear()
    optimizer = torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], lr=0.125)
    return PyTorchTrainingBackend(model, optimizer, loss_fn, folder)


def test_its_gradient_is_that_of_the_mean_and_a_checkpoint_has_it(tmp_path):
    loss_fn, other = Scaled(), Scaled()
    first, second = backend(loss_fn, tmp_path), backend(other, tmp_path)
    ids = torch.tensor([[1, 2, 3, 4]])
    batch = {"input_ids": ids, "labels": ids, "loss_mask": torch.ones(1, 4), "advantages": torch.ones(1)}

    async def train():
        metrics = await first.forward_backward(batch)
        await first.optim_step()
        await second.load_checkpoint(await first.save_checkpoint(1))
        return metrics["loss"]

    loss = trio.run(train)
    torch.testing.assert_close(loss_fn.scale.item(), 1.0 - 0.125 * loss)  # d(scale * loss) / d(scale) = loss
    assert other.scale.item() == loss_fn.scale.item()
    for each in (first, second):
        each.close()
