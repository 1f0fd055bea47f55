"""The settings and commands of TRL, verl, prime-rl and verifiers, with the matching settings and commands of
rollouts.
"""

from __future__ import annotations

from collections.abc import Collection

_NAMES = {
    "--samples-per-prompt": """n num_samples num_generations group_size rollout_n n_samples_per_prompt
        rollouts_per_example""",
    "--prompts-per-step": "batch_size train_batch_size per_device_train_batch_size rollout_batch_size",
    "--tokens-per-microbatch": """gradient_accumulation_steps micro_batch_size ppo_micro_batch_size_per_gpu
        ppo_max_token_len_per_gpu max_tokens_per_gpu""",
    "--minibatches": "num_iterations steps_per_generation ppo_mini_batch_size ppo_epochs num_steps_per_rollout",
    "--steps": "max_steps num_steps total_steps total_training_steps num_rollout epochs num_train_epochs total_epochs",
    "--lr": "learning_rate actor_lr",
    "--max-tokens": """max_completion_length max_completion_tokens max_response_length max_new_tokens response_length
        rollout_max_response_len""",
    "--max-turns": "max_tool_calling_iterations max_assistant_turns max_user_turns",
    "--inference.context-tokens": "max_length max_seq_length max_seq_len seq_len max_prompt_length max_model_len",
    "--temperature": "rollout_temperature sampling_temperature",
    "--loss": "algorithm algo adv_estimator loss_type trainer",
    "--advantage": "scale_rewards advantage_estimator",
    "--aggregation": "loss_agg_mode",
    "--loss.clip-low": "epsilon eps_clip clip_range clip_ratio clip_ratio_low",
    "--loss.clip-high": "epsilon_high eps_clip_high clip_ratio_high",
    "--kl rk3_loss --kl.coef 0.01": "beta kl_coef kl_loss_coef init_kl_coef use_kl_loss",
    "--loss.entropy-coef": "entropy_coef entropy_coeff ent_coef",
    "--filter nonzero_std --refill 8": "filter_groups dynamic_sampling dynamic_sampling_filter_path",
    "--model": "model_name model_name_or_path model_path pretrained hf_checkpoint",
    "--critic": "value_model critic_model",
    "--teacher": "teacher_model teacher_model_name_or_path",
    "--env": "environment env_id environment_factory taskset",
    "--reward": "reward_funcs reward_func reward_fn reward_function rm_path custom_reward_function",
    "--reward NAME:WEIGHT": "reward_weights",
    "--data": "dataset dataset_name train_dataset train_file train_files prompt_data",
    "--system": "system_prompt",
    "--inference vllm": "use_vllm vllm_mode",
    "--inference.memory-share": "gpu_memory_utilization vllm_gpu_memory_utilization mem_fraction_static",
    "--inference.gpus": "tensor_parallel_size vllm_tensor_parallel_size",
    "--staleness": "max_async_level async_level max_off_policy_steps",
    "--concurrency": "max_concurrent num_workers max_workers",
    "--lora-rank": "lora_r peft_config use_peft",
    "--training.lora-alpha": "lora_alpha",
    "--training.lora-targets": "lora_target_modules target_modules",
    "--training.dtype": "torch_dtype dtype",
    "--training.dtype bfloat16": "bf16",
    "--training.dtype float16": "fp16",
    "--training.device": "device",
    "--training.gradient-checkpointing": "gradient_checkpointing",
    "--optimizer": "optim",
    "--training.weight-decay": "weight_decay",
    "--training.max-grad-norm": "max_grad_norm grad_clip clip_grad",
    "--training.warmup-steps": "warmup_steps warmup_ratio lr_warmup_steps",
    "--training.lr-schedule": "lr_scheduler_type lr_scheduler",
    "--training fsdp": "fsdp deepspeed gpu gpus num_gpus n_gpus n_gpus_per_node nproc_per_node",
    "--out": "output_dir output save_dir log_dir default_local_dir name run_name experiment_name",
    "--checkpoint-every": "save_steps save_freq save_interval save_every ckpt_interval",
    "--keep-checkpoints": "save_total_limit max_ckpt_to_keep",
    "--eval-every": "eval_steps test_freq eval_interval eval_freq",
    "--eval-tasks": "num_eval_examples eval_size num_examples",
    "--logger": "report_to log_with",
    "--logger wandb": "use_wandb wandb",
    "--logger tensorboard": "use_tensorboard tensorboard",
    "--eval-tasks 0": "no_eval skip_eval",
    "rollouts run FILE": "config config_file config_path config_name",
    "rollouts --version": "version",
    "rollouts resume DIR": "resume_from_checkpoint load resume_from",
}
_MISSING = {  # settings that rollouts does not have, with the reason
    "seeds": "a run has one seed; for several, type: rollouts run --seeds 0-4, or in Python:\n"
    "for seed in range(5):\n    rollouts.run(seed=seed, ...)",
    "top_p top_k min_p": "rollouts samples from the whole distribution, since it trains on the logprobs; leave it out",
    "load_in_4bit load_in_8bit": "rollouts trains no quantized models; less memory: --lora-rank 16 "
    "--training.dtype bfloat16",
}
COMMANDS = {
    "rollouts run": "train fit grpo ppo rl",
    "rollouts sft": "finetune fine-tune",
    "rollouts eval": "test",
    "rollouts resume": "continue restart",
    "rollouts export": "merge save convert",
    "rollouts config": "init new",
    "rollouts plugins list": "list ls",
    "rollouts plugins show NAME": "show info",
    "rollouts plugins doctor": "doctor check",
    "rollouts --help": "help",
    "rollouts --version": "version",
    "pip install PACKAGE": "install add",
    "pip uninstall PACKAGE": "uninstall remove",
}
"""Commands of rollouts, each with the names that other programs have for it."""

FOREIGN = {name: ours for ours, names in _NAMES.items() for name in names.split()}
"""The flag of rollouts by the other library's name, with underscores."""


def foreign_hint(name: str, known: Collection[str] = ()) -> str:
    """A line for an error: the flag of rollouts for the name of another library's setting; empty for other names. If
    `known` flags of the command are given, also empty for a flag that is not among them.

    >>> foreign_hint("--num-generations")
    'in rollouts this is: --samples-per-prompt'
    >>> foreign_hint("--steps")
    ''
    """
    name = name.lstrip("-").replace("-", "_").lower()
    reason = next((why for names, why in _MISSING.items() if name in names.split()), "")
    if reason:
        return reason
    ours = FOREIGN.get(name, "")
    flag = ours.partition(" ")[0].partition(".")[0]
    return f"in rollouts this is: {ours}" if ours and (not known or flag in known or flag == "rollouts") else ""


def command_hint(name: str) -> str:
    """A line for an error: the command of rollouts for the name of another program's command; empty for other names.

    >>> command_hint("train")
    'in rollouts this is: rollouts run'
    """
    ours = next((ours for ours, names in COMMANDS.items() if name.lower() in names.split()), "")
    return f"in rollouts this is: {ours}" if ours else ""


def misplaced_hint(name: str, core: Collection[str]) -> str:
    """A line for an error about a setting that a component does not have, if it is a setting of the run (one of `core`)
    or the name of another library's setting. Empty for other names.

    >>> misplaced_hint("lr", ["lr"])
    '`lr` is a setting of the run itself: type --lr VALUE, or write it above the first table of the file'
    """
    if name in core:
        flag = "--" + name.replace("_", "-")
        return (
            f"`{name}` is a setting of the run itself: type {flag} VALUE, or write it above the first table of the file"
        )
    return foreign_hint(name)
