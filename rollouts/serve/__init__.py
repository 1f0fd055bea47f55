"""Serves a model over HTTP: clients of OpenAI's API get the replies of an inference engine.

http_server.py    an HTTP/1.1 server on trio and h11, with limits on connections, sizes and times
chat_api.py       `ChatAPI`: OpenAI's chat completions on any engine that takes token ids
"""
