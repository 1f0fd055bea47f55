"""One episode: a model acts in an environment, turn by turn, and rewards judge it.

episode.py       `run_episode`: set-up, turns, rewards, clean-up
model.py         `ChatModel`: the conversation of an episode, with its tokens, segments and limits
conversation.py  a person talks to the model, which has the tools of an environment
single_turns.py  answers from an engine alone, for `rollouts serve`
"""
