"""HTTP APIs of chat models, answered by the engine of a run.

exchange.py             what a client asks and what it gets, whatever API it speaks
chat_completions.py     OpenAI's Chat Completions
responses.py            OpenAI's Responses
anthropic_messages.py   Anthropic's Messages
api.py                  paths, methods and errors
endpoint.py             an address for one episode: `model.serve()`
relay.py                the way from a sandbox without a network to that address
http_server.py          HTTP/1.1 on trio

Not here: what answers: an episode (`rollouts.agent.model`), or an engine alone (`rollouts.agent.single_turns`).
"""
