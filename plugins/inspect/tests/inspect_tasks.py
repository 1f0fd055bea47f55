"""Tasks of Inspect, for the tests: each kind of solver and scorer that is served, and those that are not."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, get_model
from inspect_ai.scorer import (
    Score,
    accuracy,
    answer,
    choice,
    exact,
    f1,
    includes,
    match,
    mean,
    model_graded_qa,
    pattern,
    scorer,
)
from inspect_ai.solver import (
    chain_of_thought,
    generate,
    multiple_choice,
    prompt_template,
    self_critique,
    solver,
    system_message,
    use_tools,
    user_message,
)
from inspect_ai.tool import tool

SUMS = MemoryDataset([Sample(input=f"What is 1 + {n}?", target=str(n + 1), id=f"sum-{n}") for n in range(4)])


def sums(**more):
    return Task(dataset=SUMS, **more)


@task
def plain():
    return sums(scorer=match())


@task
def anywhere():
    return sums(scorer=includes())


@task
def equal():
    return sums(scorer=exact())


@task
def overlap():
    return sums(scorer=f1())


@task
def by_pattern(word: str = "ANSWER"):
    return sums(scorer=pattern(rf"{word}: (\d+)"))


@task
def reasoned():
    return sums(
        solver=[system_message("Be {mood}.", mood="brief"), chain_of_thought(), generate()], scorer=answer("line")
    )


@task
def templated():
    steps = [prompt_template("Sum: {prompt} ({level})"), user_message("Now."), generate()]
    samples = [
        Sample(input=[ChatMessageSystem(content="S"), ChatMessageUser(content=f"{n}")], target=str(n)) for n in (1, 2)
    ]
    for each in samples:
        each.metadata = {"level": "easy"}
    return Task(dataset=samples, solver=steps, scorer=match(numeric=True))


@task
def chosen():
    samples = [Sample(input="Which is red?", choices=["sky", "blood", "grass"], target="B") for _ in range(2)]
    return Task(dataset=samples, solver=multiple_choice(), scorer=choice())


@scorer(metrics=[mean()])
def table():
    async def score(state, target):
        text = state.output.completion
        if "skip" in text:
            return Score.unscored()
        return Score(value={"length": len(text), "right": "C" if target.text in text else "P"})

    return score


@scorer(metrics=[accuracy()])
def sometimes():
    async def score(state, target):
        return None if "skip" in state.output.completion else Score(value=target.text in state.output.completion)

    return score


@task
def several():
    return sums(scorer=[includes(), table(), match()])


@task
def partly():
    return sums(scorer=sometimes())


@task
def tabled():
    return sums(scorer=table())


@solver
def adds_a_line():
    async def solve(state, generate):
        state = await generate(state)
        state.output.completion += "\nANSWER: 1"
        return state

    return solve


@task
def edited():
    return sums(solver=adds_a_line(), scorer=answer("line"))


# --- what is not served -----------------------------------------------------------------------------------------------


@solver
def asks_twice():
    async def solve(state, generate):
        state = await generate(state)
        state.messages.append(ChatMessageUser(content="Sure?"))
        return await generate(state)

    return solve


@solver
def asks_itself():
    async def solve(state, generate):
        state.output = await get_model().generate(state.messages)
        return state

    return solve


@solver
def never_asks():
    async def solve(state, generate):
        return state

    return solve


@tool
def add():
    async def execute(a: int, b: int):
        """Add.

        Args:
            a: one
            b: other
        """
        return a + b

    return execute


@task
def twice():
    return sums(solver=asks_twice(), scorer=match())


@task
def itself():
    return sums(solver=asks_itself(), scorer=match())


@task
def never():
    return sums(solver=never_asks(), scorer=match())


@task
def critic():
    return sums(solver=[generate(), self_critique()], scorer=match())


@task
def tools():
    return sums(solver=[use_tools(add()), generate()], scorer=match())


@task
def graded():
    return sums(scorer=model_graded_qa())


@task
def boxed():
    return sums(scorer=match(), sandbox="docker")


@task
def filed():
    return Task(dataset=[Sample(input="a", target="b", files={"x": "y"})], scorer=match())


@task
def unscored():
    return sums()


@task
def empty():
    return Task(dataset=MemoryDataset([]), scorer=match())


@task
def raises():
    raise ValueError("no data here")
