"""HTTP APIs of chat models, answered by the engine of a run.

exchange.py             what a client asks and what it gets, whatever API it speaks
chat_completions.py     OpenAI's Chat Completions
responses.py            OpenAI's Responses
anthropic_messages.py   Anthropic's Messages
api.py                  paths, methods and errors
single_turns.py         answers from an engine alone: `rollouts serve`
endpoint.py             an address for one episode: `model.serve()`
http_server.py          HTTP/1.1 on trio

Not here: how an episode records what it answers (`rollouts.agent.model`).
"""
