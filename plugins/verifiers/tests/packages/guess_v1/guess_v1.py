"""Several turns: the environment is the user, in a `run` of its own. The tasks do not end."""

import itertools

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    pass


class GuessConfig(vf.TasksetConfig):
    largest: int = 9


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    INFINITE = True

    def load(self):
        for n in itertools.count():
            data = GuessData(name=f"game {n}", prompt=f"Game {n}: guess my number.", number=n % self.config.largest)
            yield GuessTask(data, self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment, won = await interaction.turn(), 0.0
            while not segment.terminated:
                guess = segment.last_reply
                if guess == str(task.data.number):
                    won = 1.0
                    break
                higher = guess.isdigit() and int(guess) < task.data.number
                segment = await interaction.turn("Higher." if higher else "Lower.")
        interaction.trace.record_reward("won", won)
        interaction.trace.record_metric("turns", interaction.trace.num_turns)
