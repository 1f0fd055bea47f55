"""Single turn: a dataset with a system prompt, a parser, and a rubric with weights."""

import verifiers as vf
from datasets import Dataset

CITIES = {
    "France": "Paris",
    "Chile": "Santiago",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Cuba": "Havana",
}


def rows(countries):
    return [{"question": f"What is the capital of {each}?", "answer": CITIES[each]} for each in countries]


def load_environment(num_eval: int = 2, shout: bool = False) -> vf.Environment:
    parser = vf.XMLParser(["think", "answer"], answer_field="answer")
    countries = sorted(CITIES)

    def right(completion, answer, **kwargs) -> float:
        said = parser.parse_answer(completion) or ""
        return float(said == (answer.upper() if shout else answer))

    async def short(completion, state) -> float:
        return 1.0 / len(state["completion"][-1]["content"] or "x")

    rubric = vf.Rubric(funcs=[right, parser.get_format_reward_func()], weights=[1.0, 0.2], parser=parser)
    rubric.add_metric(short)
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows(countries[num_eval:])),
        eval_dataset=Dataset.from_list(rows(countries[:num_eval])),
        system_prompt=f"Answer in this form:\n{parser.get_format_str()}",
        parser=parser,
        rubric=rubric,
    )
