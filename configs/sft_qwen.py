"""Supervised training of Qwen3-0.6B on conversations, all weights, on one GPU.

    rollouts sft configs/sft_qwen.py --dry-run
    rollouts sft configs/sft_qwen.py --data conversations.jsonl

The data is `no_robots` on the hub: 9,500 conversations by people. `--data` takes any other dataset or file of
conversations, such as rows of the form

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello, what can I do?"}]}

The replies of the assistant are trained, and nothing else. There is no reward, so nothing is evaluated.
Hardware: one GPU with 24 GB (RTX 4090, L4, A10).
Memory of training, estimated: 15.71 GiB.
Not run as a whole yet. What was measured on a GPU: docs/benchmarks.md.
"""

mode = "sft"
loss = "sft"
model = "Qwen/Qwen3-0.6B"
env = "prompts"
data = "HuggingFaceH4/no_robots"
template = {"enable_thinking": False}

steps = 500
prompts_per_step = 32  # conversations of a step
lr = 1e-5
tokens_per_microbatch = 16384
eval_tasks = 0
checkpoint_every = 100

inference = {"name": "hf", "context_tokens": 2048, "cache_gib": 1.0}
training = {
    "name": "fsdp",  # one rank: the computation in bfloat16, the weights in float32
    "processes": 1,
    "dtype": "bfloat16",
    "lr_schedule": "cosine",
    "gradient_checkpointing": True,
}
