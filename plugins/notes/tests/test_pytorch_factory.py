"""Functions that make torch objects, and a backend for them, as the first notes on rollouts use them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import trio
from torch import nn

from rollouts.errors import CheckpointError, ConfigError, ModelError, SignatureError, TrainingError
from rollouts.training import (
    PyTorchTrainingBackend,
    SFTTrainingConfig,
    TrainFuture,
    collate_batch,
    create_adamw_optimizer,
    create_cross_entropy_loss,
    create_pytorch_backend,
    create_warmup_cosine_scheduler,
    load_hf_model,
    run_sft_training,
)
from rollouts.training import rl_losses as library
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.backends.optimizer import TrainerSettings, lr_factor
from rollouts.training.batching import make_batch
from rollouts.types import Sample


def grpo_loss(logits, labels, loss_mask, advantages):
    """The one of the first documents, word for word."""
    log_probs = F.log_softmax(logits, dim=-1)
    target_log_probs = log_probs.gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)
    masked_log_probs = target_log_probs * loss_mask
    seq_log_probs = masked_log_probs.sum(dim=1) / loss_mask.sum(dim=1).clamp(min=1.0)
    loss = -(seq_log_probs * advantages).mean()
    return loss


SAMPLES = [
    Sample(tokens=[3, 4, 5, 6, 7], loss_mask=[0, 0, 1, 1, 1], prompt_length=2),
    Sample(tokens=[3, 9, 8], loss_mask=[0, 1, 0.5], prompt_length=1),
    Sample(tokens=[7, 7, 7, 7], loss_mask=[0, 0, 0, 0], prompt_length=1),
]


class Linear(nn.Module):
    """A model that is not one of transformers."""

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

    def make(model, loss_fn, **settings):
        optimizer = create_adamw_optimizer(model, lr=1e-2)
        made.append(PyTorchTrainingBackend(model, optimizer, loss_fn, tmp_path, **settings))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def test_adamw_over_what_requires_a_gradient():
    model = Linear()
    model.table.requires_grad_(False)
    optimizer = create_adamw_optimizer(model, 1e-3, (0.8, 0.9), 1e-6, 0.1)
    (group,) = optimizer.param_groups
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [id(each) for each in group["params"]] == [id(each) for each in model.head.parameters()]
    assert [group[name] for name in ("lr", "betas", "eps", "weight_decay")] == [1e-3, (0.8, 0.9), 1e-6, 0.1]
    with pytest.raises(ConfigError, match="--lr 0"):
        create_adamw_optimizer(model, 0)


def test_a_cosine_scheduler_is_the_backends_schedule():
    optimizer = create_adamw_optimizer(Linear(), lr=2e-3)
    scheduler = create_warmup_cosine_scheduler(optimizer, warmup_steps=3, num_steps=10, min_ratio=0.1)
    plan = TrainerSettings(lr=2e-3, warmup_steps=3, lr_schedule="cosine", lr_final=0.1, steps=10)
    for version in range(13):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(2e-3 * lr_factor(plan, version))
        optimizer.step()
        scheduler.step()
    with pytest.raises(ConfigError, match="a fraction of --lr"):
        create_warmup_cosine_scheduler(optimizer, 3, 10, 1.5)


def test_cross_entropy_is_of_the_next_token_and_weighed():
    torch.manual_seed(0)
    batch = collate_batch(SAMPLES, 3, 0)
    logits = torch.randn(3, 5, 16)
    loss = create_cross_entropy_loss()(logits, batch["labels"], batch["loss_mask"])
    total = weight = 0.0
    for row, sample in enumerate(SAMPLES):
        for t in range(1, len(sample.tokens)):
            total -= sample.loss_mask[t] * logits[row, t - 1].log_softmax(-1)[sample.tokens[t]].item()
            weight += sample.loss_mask[t]
    assert loss.item() == pytest.approx(total / weight) and loss.shape == ()
    half = create_cross_entropy_loss()(logits, batch["labels"], batch["loss_mask"] / 100)
    assert half.item() == pytest.approx(loss.item()), "a mean, also of small weights"


def test_cross_entropy_reads_nothing_that_is_masked():
    batch = collate_batch(SAMPLES, 3, 0)
    logits = torch.zeros(3, 5, 16)
    live = torch.zeros(3, 5, dtype=torch.bool)
    live[:, :-1] = batch["loss_mask"][:, 1:] > 0
    logits[~live] = math.nan
    logits.requires_grad_()
    loss = create_cross_entropy_loss()(logits, batch["labels"], batch["loss_mask"])
    loss.backward()
    assert loss.item() == pytest.approx(math.log(16)) and torch.isfinite(logits.grad).all()
    nothing = create_cross_entropy_loss()(logits, batch["labels"], torch.zeros(3, 5))
    nothing.backward()
    assert nothing.item() == 0.0


def test_cross_entropy_is_that_of_transformers():
    model = load_hf_model("tiny", dtype="float32", device="cpu")
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    output = model(ids, labels=ids)
    loss = create_cross_entropy_loss()(output.logits, ids, torch.ones(1, 5))
    torch.testing.assert_close(loss, output.loss)


def test_the_supervised_loop_of_the_first_documents(backend_of):
    async def loop(backend, num_steps):
        history = []
        for step in range(num_steps):
            batch = collate_batch(SAMPLES, 2, step)
            fwd_metrics = await backend.forward_backward(batch).result()
            opt_metrics = await backend.optim_step().result()
            history.append({**fwd_metrics, **opt_metrics, "step": step})
        path = await backend.save_checkpoint(num_steps, history[-1])
        return history, path

    model = load_hf_model("tiny", dtype="float32", device="cpu")
    backend = backend_of(model, create_cross_entropy_loss())
    history, path = trio.run(loop, backend, 6)
    assert history[-1]["loss"] < history[0]["loss"]
    assert set(history[0]) == {"loss", "grad_norm", "lr", "step"} and history[0]["lr"] == 1e-2
    assert backend.weight_version == 6
    assert path.name == "step_000006"
    # What it wrote is a model: the second half of "sft+rl" begins with it.
    again = load_hf_model(str(path), dtype="float32", device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_the_grpo_loss_of_the_first_documents(backend_of):
    batch = {**collate_batch(SAMPLES, 2, 0), "advantages": torch.tensor([1.0, -0.5])}
    backend = backend_of(Linear(), grpo_loss)
    expected = grpo_loss(backend.model(batch["input_ids"]), batch["labels"], batch["loss_mask"], batch["advantages"])
    future = backend.forward_backward(batch)
    assert isinstance(future, TrainFuture) and future.wait()["loss"] == pytest.approx(expected.item())
    assert future.wait()["grad_norm"] > 0
    assert backend.optim_step().wait() == {"lr": 1e-2}
    assert all(parameter.grad is None for parameter in backend.model.parameters())


def test_gradients_add_up_and_are_clipped(backend_of):
    def loss(logits):
        return 100 * logits.square().sum()

    batch = {"input_ids": torch.tensor([[1, 2]])}
    backend = backend_of(Linear(), loss, max_grad_norm=0.1)
    first, second = (backend.forward_backward(batch).wait()["grad_norm"] for _ in range(2))
    assert second == pytest.approx(first) and second > 1, "the mean of two equal batches is either's"
    seen = []
    backend.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.extend(p.grad.clone() for p in optimizer.param_groups[0]["params"])
    )
    backend.optim_step().wait()
    assert nn.utils.get_total_norm(seen).item() == pytest.approx(0.1, rel=1e-3)


def mean_over_rows(logits, loss_mask):
    """One whose denominator is not the sum of the mask says so."""
    live = (loss_mask[:, 1:].sum(1) > 0).float()
    return (logits.square().mean((1, 2)) * live).sum(), live.sum()


def token_mean(logits, labels, loss_mask, advantages):
    """One over tokens that also names advantages, so `mean_over` says it."""
    return create_cross_entropy_loss()(logits, labels, loss_mask)


LOSSES = [
    (create_cross_entropy_loss(), None),
    (mean_over_rows, None),
    (lambda logits: logits.square().mean(), None),
    (grpo_loss, None),
    (library.grpo_loss, None),
    (library.ppo_loss, None),
    (token_mean, "tokens"),
]


@pytest.mark.parametrize(("loss", "mean_over"), LOSSES)
def test_two_calls_before_a_step_are_one_batch(backend_of, loss, mean_over):
    """Rows of 3, 2.5 and 1 live tokens; none of them is worth more for being alone in its call."""
    rows = [
        Sample(tokens=[3, 4, 5, 6, 7], loss_mask=[0, 0, 1, 1, 1]),
        Sample(tokens=[3, 9, 8, 2, 1], loss_mask=[0, 1, 0.5, 1, 0]),
        Sample(tokens=[7, 7, 7, 7, 2], loss_mask=[0, 0, 0, 0, 1]),
    ]

    def batch_of(part):
        batch = collate_batch(part, len(part), 0)
        unknown = torch.full(batch["loss_mask"].shape, math.nan)
        advantages = torch.tensor([1.0 if sample is rows[0] else -0.5 for sample in part])
        return batch | {"advantages": advantages, "old_log_probs": unknown}

    def weights_after(parts):
        backend = backend_of(Linear(), loss, max_grad_norm=1e9, mean_over=mean_over)
        said = [backend.forward_backward(batch_of(part)).wait() for part in parts]
        assert backend.optim_step().wait() == {"lr": 1e-2}
        return torch.cat([p.detach().reshape(-1) for p in backend.model.parameters()]), said[-1]["grad_norm"]

    def sgd_step(parts):  # Adam's first step hides a factor
        model = Linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        backend = PyTorchTrainingBackend(model, optimizer, loss, mean_over=mean_over)
        for part in parts:
            backend.forward_backward(batch_of(part)).wait()
        backend.optim_step().wait()
        backend.close()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    whole, norm = weights_after([rows])
    split, last = weights_after([rows[:1], rows[1:]])
    assert last == pytest.approx(norm, rel=1e-5)
    torch.testing.assert_close(sgd_step([rows[:2], rows[2:]]), sgd_step([rows]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-5)


def test_what_a_mean_is_over_is_one_of_two(backend_of):
    with pytest.raises(ConfigError, match='mean_over is \'groups\'; expected "tokens", "rows" or None'):
        backend_of(Linear(), grpo_loss, mean_over="groups")


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_batch_of_the_loops_is_trained_at_the_temperature_of_its_samples(backend_of, temperature):
    """On samples of the model itself each ratio is 1, so the loss of PPO is minus the mean advantage; a row that is not
    trained does not count."""
    backend = backend_of(Linear(), library.ppo_loss)
    samples = []
    for number, tokens in enumerate(([3, 4, 5, 6], [7, 8, 9])):
        with torch.no_grad():
            logprobs = (backend.model(torch.tensor([tokens]))[0] / temperature).log_softmax(-1)
        known = [0.0, *(float(logprobs[at - 1, tokens[at]]) for at in range(1, len(tokens)))]
        mask = [0.0] + [1.0] * (len(tokens) - 1)
        samples.append(Sample(tokens=tokens, loss_mask=mask, rollout_log_probs=known, rollout_index=number))
    samples.append(Sample(tokens=[1, 2], loss_mask=[0.0, 0.0], rollout_log_probs=[0.0, 0.0], rollout_index=2))
    batch = make_batch(samples, [2.0, 4.0, 9.0], aggregation="token_mean", step=0, temperature=temperature)
    assert backend.forward_backward(batch).wait()["loss"] == pytest.approx(-3.0, abs=1e-5)


def test_nothing_live_changes_no_weight(backend_of):
    backend = backend_of(Linear(), create_cross_entropy_loss())
    before = backend.get_weights().wait()
    assert backend.forward_backward(collate_batch(SAMPLES[2:], 1, 0)).wait() == {"loss": 0.0, "grad_norm": 0.0}
    assert backend.optim_step().wait() == {"lr": 1e-2, "optim/skipped": 1.0} and backend.weight_version == 0
    assert all(torch.equal(before[name], value) for name, value in backend.get_weights().wait().items())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda logits: logits, r"returned shape \[1, 2, 16\]; expected a mean, or \(sum, denominator\)"),
        (lambda logits: 3.0, "returned float"),
        (lambda logits: (logits.sum(), -1.0), "the denominator -1.0"),
    ],
)
def test_a_loss_function_that_returns_something_else_is_an_error(backend_of, loss, words):
    with pytest.raises(TrainingError, match=words):
        backend_of(Linear(), loss).forward_backward({"input_ids": torch.tensor([[1, 2]])}).wait()


def test_a_loss_that_asks_for_what_is_not_there(backend_of):
    batch = collate_batch(SAMPLES, 2, 0)
    with pytest.raises(SignatureError, match=r"'advantages'.*\n.*input_ids, labels, logits, loss_mask"):
        backend_of(Linear(), grpo_loss).forward_backward(batch).wait()
    with pytest.raises(SignatureError, match="'input', 'target'"):
        backend_of(Linear(), nn.CrossEntropyLoss()).forward_backward(batch).wait()
    with pytest.raises(TrainingError, match="needs input_ids"):
        backend_of(Linear(), grpo_loss).forward_backward({"labels": batch["labels"]}).wait()
    backend = backend_of(Linear(), lambda logits: logits.sum() * math.nan)
    with pytest.raises(TrainingError, match="the loss of the batch is nan"):
        backend.forward_backward(batch).wait()
    assert all(parameter.grad is None for parameter in backend.model.parameters())


def test_weights_are_copies_and_come_back(backend_of):
    backend = backend_of(Linear(), create_cross_entropy_loss())
    weights = backend.get_weights().wait()
    before = {name: value.clone() for name, value in weights.items()}
    backend.forward_backward(collate_batch(SAMPLES, 2, 0)).wait()
    backend.optim_step().wait()
    assert all(torch.equal(before[name], value) for name, value in weights.items())
    assert not torch.equal(backend.model.head.weight, before["head.weight"])
    backend.load_weights(weights).wait()
    assert torch.equal(backend.model.head.weight, before["head.weight"])
    with pytest.raises(TrainingError, match="not this model's weights"):
        backend.load_weights({"head.weight": weights["head.weight"]}).wait()


@pytest.mark.parametrize("make_model", [Linear, lambda: load_hf_model("tiny", dtype="float32", device="cpu")])
def test_a_checkpoint_is_gone_on_with(backend_of, make_model):
    def make():
        model = make_model()
        backend = backend_of(model, create_cross_entropy_loss())
        backend._scheduler = create_warmup_cosine_scheduler(backend.optimizer, 3, 10)
        return backend

    def train(backend, steps):
        found = []
        for step in steps:
            found.append(backend.forward_backward(collate_batch(SAMPLES, 2, step)).wait()["loss"])
            found.append(backend.optim_step().wait()["lr"])
        return found

    first, second = make(), make()
    train(first, range(3))
    path = trio.run(first.save_checkpoint, 3, {"loss": 0.5})
    assert trio.run(first.save_checkpoint, 3) == path, "a second one replaces it"
    trio.run(first.save_checkpoint, 3, {"loss": 0.5})
    assert [each.name for each in path.parent.iterdir()] == [path.name], "nothing half-written lies beside it"
    assert trio.run(second.load_checkpoint, path) == {"loss": 0.5}
    assert second.weight_version == 3
    assert train(first, range(3, 6)) == train(second, range(3, 6))


def test_checkpoints_that_cannot_be_read_or_written(backend_of, tmp_path):
    backend = backend_of(Linear(), create_cross_entropy_loss())
    with pytest.raises(ConfigError, match="nowhere"):
        trio.run(backend.load_checkpoint, tmp_path / "nowhere")
    path = trio.run(backend.save_checkpoint, 1)
    with pytest.raises(ModelError, match="another model"):
        trio.run(backend_of(Linear(9), create_cross_entropy_loss()).load_checkpoint, path)
    backend._folder = tmp_path / "file"
    backend._folder.write_text("")
    with pytest.raises(CheckpointError, match=r"step_000002 cannot be written"):
        trio.run(backend.save_checkpoint, 2)


def test_one_line_makes_the_backend_that_the_loops_train():
    backend = create_pytorch_backend("tiny", lr=1e-2, num_steps=4, device="cpu", warmup_steps=0)
    try:
        config = SFTTrainingConfig(num_steps=4, batch_size=2)
        metrics = trio.run(run_sft_training, backend, SAMPLES, config)
    finally:
        backend.close()
    assert len(metrics) == 4 and backend.version == 4
    assert metrics[2]["policy/loss"] < metrics[0]["policy/loss"]


def test_one_line_takes_algorithms_by_name_and_by_themselves(monkeypatch):
    given = []
    monkeypatch.setattr(
        "rollouts.training.backends.torch.create_torch_backend",
        lambda *args, **settings: given.append((args, settings)),
    )

    def mine(logprobs, advantages):
        return -logprobs * advantages

    for algorithm in ("grpo", GRPO, mine):
        create_pytorch_backend("tiny", 1e-3, 7, algorithm, seed=3, lora_rank=2, optimizer="sgd")
    for args, settings in given:
        assert args[:6] == ("tiny", 3, 7, 1e-3, 2, 16384) and settings == {"optimizer": "sgd"}
    assert given[0][0][6] == given[1][0][6] == {"main": GRPO}
    assert given[2][0][6]["main"].terms[0].function is mine
    with pytest.raises(ConfigError, match=r"no built-in algorithm 'grop'; did you mean grpo\?\nbuilt-in: .*sft"):
        create_pytorch_backend("tiny", 1e-3, 7, "grop")
