"""Several turns: the environment answers each guess, and ends the game."""

import verifiers as vf
from datasets import Dataset


class HigherEnv(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["guesses"] = []
        return state

    @vf.stop
    async def gave_up(self, state) -> bool:
        return bool(state["guesses"]) and state["guesses"][-1] == "pass"

    async def env_response(self, messages, state, **kwargs):
        guess = str(messages[-1]["content"]).strip()
        state["guesses"].append(guess)
        number = int(state["answer"])
        if guess == str(number):
            state["final_env_response"] = [{"role": "user", "content": "Right!"}]
            return []
        if not guess.isdigit():
            return [{"role": "user", "content": "Say a number."}]
        return [{"role": "user", "content": "Higher." if int(guess) < number else "Lower."}]


def won(state) -> float:
    return float(
        state["guesses"][-1:] == [state["answer"]]
        or state["trajectory"][-1]["completion"][-1]["content"] == state["answer"]
    )


def quick(state) -> float:
    return 1.0 / max(len(state["trajectory"]), 1)


def load_environment(numbers: int = 4, max_turns: int = 5) -> vf.Environment:
    rows = [{"question": f"Game {n}: guess my number from 1 to 9.", "answer": str(2 * n + 1)} for n in range(numbers)]
    rubric = vf.RubricGroup([vf.Rubric([won]), vf.Rubric([quick], weights=[0.5])])
    return HigherEnv(dataset=lambda: Dataset.from_list(rows), rubric=rubric, max_turns=max_turns)
