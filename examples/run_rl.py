"""Reinforcement with your own model, optimizer and loss: the parts of the loop, and one call that runs it.

    python examples/run_rl.py               # half a minute on a laptop's CPU, offline
    python examples/run_rl.py --steps 5

The manager plays episodes of an environment; its rewards judge them. The advantage of an episode is its reward minus
`baseline`. An endpoint of this process samples with the weights of the backend. For a server, give `Endpoint` its
address, or write a `generate_fn` and give `inference_engines=[SGLangEngine(base_url="http://localhost:30000")]`:

    Starting RL training...
      Steps: 40
      Weight sync every: 1 steps
    Step 0: reward=0.11, loss=-0.6815, grad_norm=0.6716, lr=3.0000e-04
    Step 10: reward=0.75, loss=-0.1474, grad_norm=0.5286, lr=3.0000e-04
      Saved checkpoint to /tmp/.../step_000020
    Step 20: reward=0.83, loss=-0.0619, grad_norm=0.3106, lr=3.0000e-04
    Step 30: reward=0.91, loss=-0.0229, grad_norm=0.2435, lr=3.0000e-04
      Saved checkpoint to /tmp/.../step_000040
    RL training complete!
    Total steps: 40
    Final mean reward: 0.98
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import trio

from rollouts import CalculatorEnvironment, Endpoint
from rollouts.training import (
    AsyncRolloutManager,
    PyTorchTrainingBackend,
    RLTrainingConfig,
    RolloutConfig,
    grpo_loss,
    load_hf_model,
    run_rl_training,
)


async def main(steps: int = 40, out: str = "") -> list[dict[str, float]]:
    out = out or tempfile.mkdtemp()
    # 1. The rollouts: which model plays, and where.
    rollout_config = RolloutConfig(
        batch_size=8,
        n_samples_per_prompt=8,
        endpoint=Endpoint(provider="hf", model="tiny", max_tokens=64, max_turns=4),
        environment=CalculatorEnvironment(),
    )
    rollout_manager = AsyncRolloutManager(rollout_config=rollout_config)

    # 2. The training backend: your own torch objects.
    model = load_hf_model("tiny", device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    backend = PyTorchTrainingBackend(model=model, optimizer=optimizer, loss_fn=grpo_loss, checkpoint_dir=out)

    # 3. The loop: sample, reward, train, sync.
    config = RLTrainingConfig(num_steps=steps, sync_every=1, baseline=0.5, log_every=10, checkpoint_every=20)
    metrics = await run_rl_training(backend=backend, rollout_manager=rollout_manager, config=config)
    backend.close()

    print(f"Total steps: {len(metrics)}")
    print(f"Final mean reward: {metrics[-1]['mean_reward']:.2f}")
    return metrics


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    trio.run(main, parser.parse_args().steps)
