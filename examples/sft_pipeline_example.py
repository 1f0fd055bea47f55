"""A pipeline of supervised training: prepare the next batch while the model trains on this one.

    python examples/sft_pipeline_example.py               # ten seconds on a laptop's CPU, offline
    python examples/sft_pipeline_example.py --steps 5

Every call of a backend returns a future at once, and one thread works on them in the order of the calls. So you submit
`forward_backward` and `optim_step`, make the next batch, and then wait. It prints:

    step  0  loss 7.439
    step 10  loss 1.447
    step 20  loss 1.258
    step 30  loss 1.286
    step 40  loss 1.066
    step 50  loss 1.034
    step 59  loss 0.990
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import trio

from rollouts import Message, Sample
from rollouts.chat import load_chat_format, tokenize_supervised
from rollouts.models.loading import load_tokenizer
from rollouts.training import (
    DataBuffer,
    PyTorchTrainingBackend,
    RolloutBatch,
    RolloutConfig,
    create_adamw_optimizer,
    create_cross_entropy_loss,
    generate_rollout_batches,
    load_hf_model,
    prepare_sft_batch,
)


def batches(batch_size: int) -> Iterator[RolloutBatch]:
    """Conversations with an expert, as tokens and masks. Only the expert's replies are trained."""
    chat = load_chat_format(load_tokenizer("tiny"))

    def ask_the_expert(prompts: list[str]) -> list[Sample]:
        samples = []
        for prompt in prompts:
            reply = str(sum(int(word) for word in prompt.split() if word.isdigit()))
            (row,) = tokenize_supervised([Message("user", prompt), Message("assistant", reply)], [], chat)
            samples.append(Sample(prompt, reply, tokens=row.tokens, loss_mask=row.loss_mask))
        return samples

    buffer = DataBuffer([f"Add {a} and {b}" for a in range(10) for b in range(10)], seed=0)
    return generate_rollout_batches(buffer, RolloutConfig(batch_size, generate_fn=ask_the_expert))


async def main(steps: int = 60) -> list[float]:
    model = load_hf_model("tiny", device="cpu")
    optimizer = create_adamw_optimizer(model, lr=1e-3)
    backend = PyTorchTrainingBackend(model, optimizer, create_cross_entropy_loss())
    source, losses = batches(16), []
    batch = next(source)
    for step in range(steps):
        rows = [Sample(tokens=ids, loss_mask=mask) for ids, mask in zip(batch.tokens, batch.loss_masks, strict=True)]
        forward_backward = backend.forward_backward(prepare_sft_batch(rows))
        optim_step = backend.optim_step()
        batch = next(source)  # while the thread of the backend computes
        losses.append((await forward_backward)["loss"])
        await optim_step
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:2}  loss {losses[-1]:.3f}")
    backend.close()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    trio.run(main, parser.parse_args().steps)
