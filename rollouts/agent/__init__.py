"""One episode: a model acts in an environment, turn by turn, and is judged.

episode.py       `run_episode`: set up, turns, rewards, close
model.py         what an episode asks of its model; tokens, segments, limits
tools.py         one tool call and its answer
conversation.py  a person talks to the model, which has the same tools
"""
