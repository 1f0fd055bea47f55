"""rollouts on one GPU, in parts that take about four minutes each. `--scale dry` runs everything tiny on a CPU.

    python benchmarks/gpu.py kernels
    python benchmarks/gpu.py train long grpo --json figures.json
    python benchmarks/gpu.py train --only lora
    python benchmarks/gpu.py kernels train long grpo generate job peers tests --scale dry

The parts:

- kernels: FlexAttention and varlen attention, compared with dense attention on random forests; then milliseconds a call
- train: 76 supervised rows of a median of 700 tokens, ours beside a trainer written by hand (`gpu_limit.py`)
- long: the same for 2 rows of 16,384 tokens
- grpo: the same for groups that share prompts, and for rows of several turns whose history is rewritten. The trainer
  written by hand shares nothing
- train4b: adapters of a model of 4 B
- generate: the embedded engine, beside `generate` of transformers; and how far the trainer's logprobs are from it
- job: the main job, `rollouts run --env calculator --loss grpo`
- peers: TRL's `SFTTrainer` on the supervised rows, if trl is installed
- tests: the tests of training and inference, on the GPU

The model has the shape of Qwen3-0.6B, random weights, and a vocabulary of 151,936. In `train`, `long`, `grpo` and
`train4b`, the two sides take turns in one process: a block of steps of ours, a block of the other. `of_limit` is the
median of our tokens a second over that of the limit. Tokens are those of all rows: a shared prompt counts in each of
them, and padding does not count. `host_share` is the part of a step in which the host did not wait for the device: 1.00
means that the device waited for the host. `compiled` counts the graphs that were compiled after the warm-up; it should
be 0. The first losses of the two sides are compared, and with all weights the norms of their first gradients.

Each part is a process of its own. A part that fails prints its error, and the others go on; the exit code is then 1.
A part starts nothing new after `--seconds`, and says what it left out. The last line is one JSON object.

Needs no packages beyond those of training; `peers` needs trl and datasets. Runs with torch 2.11 and newer.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import trio
from gpu_kernels import check_kernels, time_kernels
from gpu_rows import Work, group_work, long_work, middle_work, sizes_of, supervised_work, turn_work
from gpu_sides import LEARNING_RATE, SETTINGS, Bench, Figures, Ours, Variant, compare_all, free, synchronize
from transformers import AutoTokenizer, Qwen3ForCausalLM

from rollouts.inference.base import GenerateRequest, Generation
from rollouts.inference.embedded.hf import HFInference, create_hf_inference
from rollouts.training.batching import make_batch
from rollouts.types import Sample

ROOT = Path(__file__).resolve().parent.parent
RANK = 16

# --- parts ------------------------------------------------------------------------------------------------------------


ALL, ALL_SAVING = Variant("torch", 0, False), Variant("torch", 0, True)
LORA, LORA_SAVING = Variant("torch", RANK, False), Variant("torch", RANK, True)
SHARDED, SHARDED_SAVING = Variant("fsdp", 0, False), Variant("fsdp", 0, True)


def run_kernels(bench: Bench) -> None:
    """Attention over forests: right, and how fast."""
    try:
        check_kernels(bench.device, bench.add, forests=4)
    finally:
        time_kernels(bench.device, bench.add)


def run_train(bench: Bench) -> None:
    """Supervised rows."""
    work = supervised_work(bench.sizes)
    variants = [ALL, LORA, SHARDED_SAVING, ALL_SAVING, LORA_SAVING, SHARDED]
    compare_all(bench, bench.model(), [(work, variant) for variant in variants])


def run_long(bench: Bench) -> None:
    """Long rows."""
    work = long_work(bench.sizes)
    compare_all(bench, bench.model(), [(work, variant) for variant in (ALL, SHARDED_SAVING, LORA_SAVING, ALL_SAVING)])


def run_grpo(bench: Bench) -> None:
    """Rows of rollouts."""
    groups, turns = group_work(bench.sizes), turn_work(bench.sizes)
    pairs = [(groups, ALL), (turns, ALL), (groups, LORA), (turns, LORA), (groups, SHARDED_SAVING)]
    compare_all(bench, bench.model(), pairs)


def run_train4b(bench: Bench) -> None:
    """Adapters of a larger model, on rows of 1,000 to 2,000 tokens."""
    work = middle_work(bench.sizes)
    is_large = bench.on_gpu and torch.cuda.get_device_properties(0).total_memory > 100 * 2**30
    variants = [LORA_SAVING, LORA] if is_large or not bench.on_gpu else [LORA_SAVING]
    compare_all(bench, bench.model("4b"), [(work, variant) for variant in variants])


async def _generate(engine: HFInference, prompts: list[list[int]], count: int) -> list[Generation]:
    """A reply of `count` tokens for each prompt, all in one batch."""
    replies: list[Generation | None] = [None] * len(prompts)

    async def play(number: int, session: str) -> None:
        request = GenerateRequest(prompts[number], max_tokens=count, stop_ids=(), seed=number, session=session)
        replies[number] = await engine.generate(request)
        engine.close_session(session)

    sessions = [engine.open_session((number,)) for number in range(len(prompts))]
    async with trio.open_nursery() as nursery:
        for number, session in enumerate(sessions):
            nursery.start_soon(play, number, session)
    return [reply for reply in replies if reply is not None]


def run_generate(bench: Bench) -> None:
    """Tokens a second of the embedded engine and of transformers, in turn; and the mismatch."""
    sizes, model = bench.sizes, bench.model()
    dtype = "bfloat16" if bench.on_gpu else "float32"
    tokens = long_work(sizes._replace(long=sizes.generated_rows * sizes.generated_prompt)).samples[0].tokens
    width, count = sizes.generated_prompt, sizes.generated
    prompts = [tokens[start : start + width] for start in range(0, len(tokens), width)]
    causal = Qwen3ForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(bench.device).eval()
    ids = torch.tensor(prompts, device=bench.device)
    seconds_of: dict[str, list[float]] = {"ours": [], "transformers": []}

    def theirs() -> None:
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": count, "do_sample": True, "top_k": 0}
        replies = causal.generate(input_ids=ids, **settings)
        assert replies.shape[1] == width + count, f"{replies.shape}"

    async def take_turns() -> None:
        async with create_hf_inference(model, None, 0, dtype=dtype) as engine:
            for _ in range(bench.options.blocks + 1):
                start = time.perf_counter()
                replies = await _generate(engine, prompts, count)
                seconds_of["ours"].append(time.perf_counter() - start)
                assert all(len(reply.tokens) == count for reply in replies), "a reply has another length"
                seconds_of["transformers"].append(timed(theirs))

    trio.run(take_turns)
    for name, blocks in seconds_of.items():
        seconds = statistics.median(blocks[1:])
        speed = len(prompts) * count / seconds
        bench.add(side=name, tokens_per_second=speed, ms_per_token=1e3 * seconds / count, seconds=seconds)
    causal.to("cpu")  # frees the device's memory for the trainer
    free()
    measure_mismatch(bench, model, prompts, count)


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call, until the device has finished."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def measure_mismatch(bench: Bench, model: str, prompts: list[list[int]], count: int) -> None:
    """Sample with the trainer's weights, and compare the sampler's logprobs with the trainer's."""
    variant = ALL if SETTINGS["dtype"] == "auto" or not bench.on_gpu else LORA
    side = Ours(bench, model, Work("", [], None), variant)

    async def sample() -> list[Generation]:
        async with create_hf_inference(model, side.backend, 0) as engine:
            return await _generate(engine, prompts, count)

    try:
        replies = trio.run(sample)
        samples = [
            Sample(tokens=[*prompt, *reply.tokens], loss_mask=[0.0] * len(prompt) + [1.0] * count, rollout_index=number)
            for number, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
        ]
        batch = make_batch(samples, [0.0] * len(samples), aggregation="token_mean", step=0)
        scored = side.backend.forward(batch, ("logprobs",), only_live=True).wait().logprobs
        apart = [
            abs(one - other)
            for row, reply in zip(scored, replies, strict=True)
            for one, other in zip(row[-count:], reply.logprobs, strict=True)
        ]
        bench.add(side=f"mismatch, {variant.name}", mean_nats=statistics.fmean(apart), max_nats=max(apart))
    finally:
        side.close()


def run_job(bench: Bench) -> None:
    """The main job: seconds a step from its own metrics."""
    steps = 40 if bench.options.scale == "full" else 2
    folder = Path(tempfile.mkdtemp(dir=bench.folder)) / "job"
    command = [sys.executable, "-m", "rollouts", "run", "--env", "calculator", "--loss", "grpo"]
    command += ["--steps", str(steps), "--out", str(folder)]
    command += [] if bench.options.scale == "full" else ["--prompts-per-step", "2", "--eval-tasks", "4"]
    seconds = timed(lambda: subprocess.run(command, check=True, cwd=bench.folder))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = metrics[min(5, len(metrics) - 1) :]
    names = ("time/step", "time/generate", "time/forward_backward")
    medians = {
        name.removeprefix("time/"): statistics.median(line[name] for line in last) for name in names if name in last[0]
    }
    bench.add(steps=len(metrics), **{f"{name}_seconds": value for name, value in medians.items()}, wall_seconds=seconds)


def run_peers(bench: Bench) -> None:
    """TRL's SFTTrainer on the supervised rows, all weights, with one row a pass, and with rows of similar length."""
    if importlib.util.find_spec("trl") is None or importlib.util.find_spec("datasets") is None:
        bench.add(note="left out: trl or datasets is not installed")
        return
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

    work, model = supervised_work(bench.sizes), bench.model()
    samples = sorted(work.samples, key=lambda sample: len(sample.tokens))
    data = Dataset.from_list([{"input_ids": sample.tokens, "labels": sample.tokens} for sample in samples])
    steps = 2 if bench.on_gpu else 1
    for rows, checkpoints in ((1, True), (4, True), (1, False)):
        label = {"side": f"trl {importlib.metadata.version('trl')}", "rows_per_pass": rows, "checkpoints": checkpoints}
        if time.monotonic() > bench.deadline:
            bench.add(**label, note="left out: no time")
            continue
        config = SFTConfig(
            output_dir=str(bench.folder / "trl"),
            max_steps=steps + 1,
            learning_rate=LEARNING_RATE,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=len(samples) // rows,
            train_sampling_strategy="sequential",
            max_length=bench.sizes.longest,
            gradient_checkpointing=checkpoints,
            bf16=bench.on_gpu,
            use_cpu=not bench.on_gpu,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        clock = step_clock()
        causal = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(model)
        trainer = SFTTrainer(causal, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[clock])
        if bench.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
        seconds = statistics.median(clock.seconds[1:])
        peak = torch.cuda.max_memory_allocated() / 2**30 if bench.on_gpu else 0.0
        bench.add(**label, tokens_per_second=work.tokens / seconds, seconds=seconds, peak_gib=peak)
        del trainer, causal
        free()


def step_clock() -> Any:
    """A callback for a Trainer of transformers that measures the seconds of steps."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            """A step begins."""
            synchronize()
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """A step ended."""
            synchronize()
            self.seconds.append(time.perf_counter() - self.start)

    return Clock()


def run_tests(bench: Bench) -> None:
    """The tests of training and inference."""
    paths = (
        ["tests/training", "tests/inference"] if bench.options.scale == "full" else ["tests/training/test_filters.py"]
    )
    workers = [] if bench.options.scale == "full" else ["-n0"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, *paths]
    environment = {**os.environ, "ROLLOUTS_TESTS_SEE_GPUS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    print("\n".join(lines[-40:]), done.stderr[-2000:])
    bench.add(result=lines[-1].strip("= ") if lines else done.stderr[-200:])
    if done.returncode:
        raise RuntimeError(f"pytest ended with {done.returncode}")


PARTS: dict[str, Callable[[Bench], None]] = {
    "kernels": run_kernels,
    "train": run_train,
    "long": run_long,
    "grpo": run_grpo,
    "train4b": run_train4b,
    "generate": run_generate,
    "job": run_job,
    "peers": run_peers,
    "tests": run_tests,
}


# --- the command ------------------------------------------------------------------------------------------------------


def run_part(name: str, options: argparse.Namespace) -> None:
    """Run one part in this process. Its figures go to a file, one line each, so that a part that dies leaves some."""
    torch.set_num_threads(1) if options.scale == "dry" else None
    warnings.filterwarnings("ignore", module="trl|transformers|peft|torch")
    folder = Path(options.folder)
    device = "cuda" if torch.cuda.is_available() and options.scale == "full" else "cpu"

    def add(**figures: Any) -> None:
        known = {key: value for key, value in figures.items() if value is not None}
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(known) + "\n")
        print("  " + ", ".join(f"{key} {shown(value)}" for key, value in known.items()), flush=True)

    deadline = time.monotonic() + options.seconds
    PARTS[name](Bench(options, sizes_of(options.scale), device, folder, add, deadline))


def shown(value: Any) -> str:
    """A value for people."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(rows: list[Figures]) -> Iterator[str]:
    """The lines of a table whose columns are the keys of the rows."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([shown(row[key]) if key in row else "" for key in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        if line is columns:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"


@contextmanager
def work_folder(path: str) -> Iterator[Path]:
    """The folder for models and figures."""
    if path:
        Path(path).mkdir(parents=True, exist_ok=True)
        yield Path(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def run_apart(name: str, folder: Path, arguments: list[str], seconds: float) -> Figures:
    """Run a part in a process of its own. Its figures, and its error, if it failed."""
    start = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), name, *arguments, "--folder", str(folder), "--here"]
    print(f"{name}:", flush=True)
    file, failed = folder / f"{name}.jsonl", folder / f"{name}.error"
    for left in (file, failed):
        left.unlink(missing_ok=True)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if "dry" in arguments else {}
    environment = {**os.environ, **hidden}
    try:
        code = subprocess.run(command, timeout=2 * seconds + 120, env=environment).returncode
        error = f"ended with {code}" if code else ""
    except subprocess.TimeoutExpired:
        error = "took too long"
    figures = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if error and failed.exists():
        error = failed.read_text()
    result: Figures = {"seconds": round(time.monotonic() - start, 1), "figures": figures}
    return result | ({"error": error} if error else {})


def machine(scale: str) -> Figures:
    """What the figures belong to."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    device = torch.cuda.get_device_name() if scale == "full" else "cpu"
    return {"device": device, **versions, "python": sys.version.split()[0]}


def main() -> int:
    """Run the parts. The exit code: 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--scale", choices=("dry", "full"), default="full", help="dry: everything tiny, on a CPU")
    parser.add_argument("--only", default="", help="the work and variants of training whose names contain this")
    parser.add_argument("--compile", choices=("auto", "layers", "off"), default="auto", help="auto: on a GPU")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each side that do not count")
    parser.add_argument("--steps", type=int, default=2, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=3, help="blocks of each side")
    parser.add_argument("--seconds", type=float, default=200.0, help="after which a part starts nothing new")
    parser.add_argument("--json", default="", help="write the figures to this file")
    parser.add_argument("--folder", default="", help="for models and figures (default: a temporary one)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        (part,) = options.parts
        try:
            run_part(part, options)
        except Exception as error:
            traceback.print_exc()
            (Path(options.folder) / f"{part}.error").write_text(f"{type(error).__name__}: {error}")
            return 1
        return 0
    if options.scale == "full" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --scale dry runs everything tiny on a CPU")
    names = ("scale", "only", "compile", "warmup", "steps", "blocks", "seconds")
    arguments = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
    results: dict[str, Figures] = {}
    figures = {**machine(options.scale), "scale": options.scale, "parts": results}
    with work_folder(options.folder) as folder:
        for part in dict.fromkeys(options.parts):
            results[part] = run_apart(part, folder, arguments, options.seconds)
            if options.json:
                Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")
    for part, result in results.items():
        print(f"\n{part}, {result['seconds']:.0f} s", f"FAILED: {result['error']}" if "error" in result else "")
        for _, rows in itertools.groupby(result["figures"], key=lambda row: next(iter(row))):
            print("\n".join(table(list(rows))))
    print(json.dumps(figures))
    return int(any("error" in result for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
