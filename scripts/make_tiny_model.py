"""Make the embedded tiny model: tokenizer, chat template and a warmed-up policy of under a million parameters.

    python scripts/make_tiny_model.py                 # writes rollouts/tiny/, a few minutes on one CPU core

The policy is a Qwen3 of two layers. It writes tool calls in the right format, but is poor at the task on purpose. On
calculator questions, about a third of its replies call the tool and copy the result. The others answer at once with a
plausible wrong number. The two kinds of reply differ in their first token, and the wrong kind is more likely. So greedy
decoding fails, a sharper distribution does not help, and only a reward shows which kind is better.

The prompt contains the tool schema of the calculator environment, so it equals the prompt of a run byte for byte. The
model cannot memorize the task: questions are random, direct answers are always wrong, and results of the tool are only
copied.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
GUESS = "The answer is {}"  # the first token of a direct answer is the likeliest one, so greedy decoding guesses
COPY_STAGE = 0.6  # the warm-up begins with tool calls: copying takes the longest to learn
README = """# The embedded tiny model

`--model tiny`: a Qwen3 of {parameters:,} parameters ({layers} layers × {hidden}, fp32), {vocabulary} tokens, made from
nothing by `python scripts/make_tiny_model.py --seed {seed}`. It was warmed up on calculator conversations. In
{share:.0%} of them the assistant uses the tool, and in the others it answers at once and wrongly. So the model knows
the tool-call format, but is poor at the task. On 512 new tasks (two digits, `*`), {sampled:.3f} of the replies are
right at temperature 1, and {greedy:.3f} with greedy decoding; of the sampled replies that use the tool, {tool:.3f} are
right. All training data was randomly generated.
"""

NAMES = ["calculator", "calculate", "calc", "evaluate", "math"]
DESCRIPTIONS = ["Evaluate an arithmetic expression.", "Calculate the value of an expression.", "Do the math.", ""]

Message = dict[str, Any]


class Preamble(NamedTuple):
    """A system message, or None, and the tools' schemas, or None."""

    system: str | None
    tools: list[dict[str, Any]] | None


class Question(NamedTuple):
    """An arithmetic question: two operands and an operator."""

    left: int
    operator: str
    right: int

    @property
    def expression(self) -> str:
        return f"{self.left} {self.operator} {self.right}"

    @property
    def value(self) -> int:
        return OPERATORS[self.operator](self.left, self.right)


def draw_question(rng: random.Random, *, varied: bool) -> Question:
    """A question of the default task (two digits, times), or of one to three digits and any operator."""
    if not varied:
        return Question(rng.randrange(100), "*", rng.randrange(100))
    left, right = (rng.randrange(10 ** rng.randint(1, 3)) for _ in range(2))
    return Question(left, rng.choice("+-*"), right)


def wrong_number(question: Question, rng: random.Random) -> int:
    """A wrong number with as many digits as the right one."""
    digits = len(str(abs(question.value)))
    while True:
        guess = rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
        if guess != abs(question.value):
            return -guess if question.value < 0 else guess


def conversation(
    question: Question, rng: random.Random, *, tool_share: float, tool: str = "calculator"
) -> list[Message]:
    """User, assistant (a tool call), tool, assistant; or user and a wrong assistant."""
    user = {"role": "user", "content": f"What is {question.expression}?"}
    if rng.random() >= tool_share:
        return [user, {"role": "assistant", "content": GUESS.format(wrong_number(question, rng))}]
    function = {"name": tool, "arguments": {"expression": question.expression}}
    return [
        user,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": str(question.value)},
        {"role": "assistant", "content": str(question.value)},  # as the environment's demonstrations do
    ]


def calculator_schema() -> dict[str, Any]:
    """The tool's schema, exactly as a run puts it into the prompt."""
    from rollouts_calculator import Calculator

    from rollouts.env.authoring import tools_of
    from rollouts.env.schema import tool_schema

    (tool,) = tools_of(Calculator)
    return tool_schema(tool.function, tool.name)


def draw_preamble(rng: random.Random, schema: dict[str, Any]) -> Preamble:
    """The preamble of a batch: mostly the schema of the environment, sometimes another one."""
    kind = rng.random()
    system = "You are a helpful assistant." if rng.random() < 0.1 else None
    if kind < 0.75:
        return Preamble(system, [schema])
    if kind < 0.8:
        return Preamble(system, None)
    other = copy.deepcopy(schema)
    function = other["function"]
    function["name"] = rng.choice(NAMES)
    function["description"] = rng.choice(DESCRIPTIONS)
    argument = function["parameters"]["properties"]["expression"]
    argument.pop("description", None)
    if rng.random() < 0.5:
        argument["description"] = "The expression."
    return Preamble(system, [other])


# --- tokenizer ---------------------------------------------------------------------------------------------------


def make_tokenizer(texts: Iterator[str], vocabulary: int, *, context: int) -> Any:
    """Byte-level BPE with `vocabulary` tokens. Each digit and each newline is one token."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9\n]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(MARKERS),
        special_tokens=SPECIAL,
        max_token_length=16,  # words and phrases; no token may be a whole schema, which no other schema could use
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    split = re.compile("|".join(map(re.escape, SPECIAL + MARKERS)))
    tokenizer.train_from_iterator((piece for text in texts for piece in split.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return fast


# --- warm-up -----------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Token ids of one conversation, and which of them the assistant wrote."""

    tokens: list[int]
    mask: list[bool]


def encode(tokenizer: Any, messages: list[Message], tools: list[dict[str, Any]] | None) -> Row:
    """Encode turn by turn, as a run does, so that no token spans a prompt and a reply."""
    tokens: list[int] = []
    mask: list[bool] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(messages[:index], tools, tokenize=False, add_generation_prompt=True)
        full = tokenizer.apply_chat_template(messages[: index + 1], tools, tokenize=False)
        assert full.startswith(prompt) and prompt.startswith(done), "the template must only append"
        reply = full[len(prompt) :].removesuffix(
            "\n"
        )  # the template writes the newline after <|im_end|>, not the model
        for text, said in ((prompt[len(done) :], False), (reply, True)):
            ids = tokenizer(text)["input_ids"]
            tokens += ids
            mask += [said] * len(ids)
        done = prompt + reply
    return Row(tokens, mask)


def make_model(tokenizer: Any, *, seed: int, context: int) -> Any:
    """A random Qwen3. head_dim 32 is the smallest that the usual inference servers accept."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    stop = tokenizer.eos_token_id
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=stop,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=stop, pad_token_id=tokenizer.pad_token_id
    )
    return model


def batch_loss(model: Any, rows: list[Row]) -> Any:
    """Mean cross-entropy of the assistant's tokens. The tokens that all rows begin with (the tools) are computed
    once.
    """
    import torch

    shortest = min(len(row.tokens) for row in rows)
    columns = zip(*(row.tokens[:shortest] for row in rows), strict=True)
    shared = next((i for i, column in enumerate(columns) if len(set(column)) > 1), shortest) - 1
    width = max(len(row.tokens) for row in rows) - shared
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    live = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens) - shared] = torch.tensor(row.tokens[shared:])
        live[i, : len(row.tokens) - shared] = torch.tensor(row.mask[shared:])
    cache = model.model(torch.tensor([rows[0].tokens[:shared]]), use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(rows))
    hidden = model.model(
        tokens, past_key_values=cache
    ).last_hidden_state  # right-padded: causal attention needs no mask
    said = live[:, 1:]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[:, :-1][said]), tokens[:, 1:][said])


def draw_rows(
    tokenizer: Any, schema: dict[str, Any], rng: random.Random, *, count: int, tool_share: float
) -> list[Row]:
    """A batch of conversations with the same preamble. Without a tool, all of them answer at once."""
    system, tools = draw_preamble(rng, schema)
    name = tools[0]["function"]["name"] if tools else ""
    before = [{"role": "system", "content": system}] if system else []
    rows = []
    for _ in range(count):
        question = draw_question(rng, varied=rng.random() < 0.25)
        messages = conversation(question, rng, tool_share=tool_share if tools else 0.0, tool=name)
        rows.append(encode(tokenizer, before + messages, tools))
    return rows


def warm_up(model: Any, tokenizer: Any, settings: argparse.Namespace, schema: dict[str, Any]) -> None:
    """Supervised steps on random conversations."""
    import torch

    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.perf_counter()
    for step in range(settings.steps):
        progress = min((step + 1) / 50, 1.0) * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * max(progress, 0.02)
        share = 0.9 if step < settings.steps * COPY_STAGE else settings.tool_share
        loss = batch_loss(model, draw_rows(tokenizer, schema, rng, count=settings.batch, tool_share=share))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step + 1 == settings.steps:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.perf_counter() - started:5.0f} s", flush=True)


# --- check -------------------------------------------------------------------------------------------------------


class Report(NamedTuple):
    """The shares of replies that are right and that use the tool; and of those with the tool, the share that is
    right.
    """

    right: float
    used_tool: float
    right_with_tool: float


def reply_texts(model: Any, tokenizer: Any, prompts: list[str], *, sample: bool) -> list[str]:
    """One reply for each prompt, padded on the left."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    how = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False, "temperature": None}
    out = model.generate(**batch, max_new_tokens=64, **how)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :])
    return [text.split("<|im_end|>")[0] for text in texts]


def measure(model: Any, tokenizer: Any, schema: dict[str, Any], *, sample: bool, tasks: int, seed: int) -> Report:
    """Run `tasks` new two-digit products, with at most one tool call each."""
    import torch

    torch.manual_seed(seed)
    rng = random.Random(f"check {seed}")
    questions = [draw_question(rng, varied=False) for _ in range(tasks)]
    histories = [[{"role": "user", "content": f"What is {q.expression}?"}] for q in questions]

    def render(history: list[Message]) -> str:
        return str(tokenizer.apply_chat_template(history, [schema], tokenize=False, add_generation_prompt=True))

    finals = reply_texts(model, tokenizer, [render(h) for h in histories], sample=sample)
    called = [i for i, text in enumerate(finals) if "<tool_call>" in text]
    prompts = []
    for i in called:
        found = re.search(r'"expression": "(\d+) ([*+-]) (\d+)"', finals[i])
        result = str(Question(int(found[1]), found[2], int(found[3])).value) if found else "error"
        message = {"role": "tool", "content": result}
        prompts.append(render(histories[i]) + finals[i] + "<|im_end|>\n" + _suffix(tokenizer, message))
    if prompts:
        for i, text in zip(called, reply_texts(model, tokenizer, prompts, sample=sample), strict=True):
            finals[i] = text
    right = [re.findall(r"-?\d+", t)[-1:] == [str(q.value)] for t, q in zip(finals, questions, strict=True)]
    return Report(sum(right) / tasks, len(called) / tasks, sum(right[i] for i in called) / max(len(called), 1))


def _suffix(tokenizer: Any, message: Message) -> str:
    return str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))


def main(arguments: list[str] | None = None) -> int:
    """Make the model, check it against its targets and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "rollouts" / "tiny", help="output folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64, help="conversations a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--tool-share", type=float, default=0.28, help="share of conversations that use the tool")
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--context", type=int, default=2048)
    settings = parser.parse_args(arguments)
    schema = calculator_schema()
    rng = random.Random(f"tokenizer {settings.seed}")
    tokenizer = make_tokenizer(_corpus(schema, rng), settings.vocabulary, context=settings.context)
    model = make_model(tokenizer, seed=settings.seed, context=settings.context)
    warm_up(model, tokenizer, settings, schema)
    model.eval()
    sampled = measure(model, tokenizer, schema, sample=True, tasks=512, seed=settings.seed)
    greedy = measure(model, tokenizer, schema, sample=False, tasks=512, seed=settings.seed)
    print(f"sampled {sampled}\ngreedy  {greedy}")
    write(model, tokenizer, settings, sampled, greedy)
    good = 0.2 <= sampled.right <= 0.35 and greedy.right <= 0.05 and sampled.right_with_tool >= 0.95
    print("on target" if good else "NOT on target: sampled .2 to .35, greedy <= .05, right with the tool >= .95")
    return 0 if good else 1


def _corpus(schema: dict[str, Any], rng: random.Random, count: int = 2000) -> Iterator[str]:
    """Rendered conversations as plain text, for the merges."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = TEMPLATE.read_text(encoding="utf-8")
    for _ in range(count):
        messages = conversation(draw_question(rng, varied=True), rng, tool_share=0.5)
        (text,), _ = render_jinja_template([messages], tools=[schema], chat_template=template)
        yield text


def write(model: Any, tokenizer: Any, settings: argparse.Namespace, sampled: Report, greedy: Report) -> None:
    """Write the model and its README, with the measured numbers."""
    settings.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(settings.out)
    tokenizer.save_pretrained(settings.out)
    _name_portably(settings.out / "tokenizer_config.json")
    readme = README.format(
        parameters=model.num_parameters(),
        layers=model.config.num_hidden_layers,
        hidden=model.config.hidden_size,
        vocabulary=len(tokenizer),
        seed=settings.seed,
        share=settings.tool_share,
        sampled=sampled.right,
        greedy=greedy.right,
        tool=sampled.right_with_tool,
    )
    (settings.out / "README.md").write_text(readme, encoding="utf-8")
    for path in settings.out.iterdir():
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in settings.out.iterdir())
    print(f"wrote {settings.out}: {size / 2**20:.2f} MiB")
    print(json.dumps(sorted(path.name for path in settings.out.iterdir())))


def _name_portably(path: Path) -> None:
    """Give the tokenizer a class name that old versions of transformers have: servers may use an old version."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("backend", None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
