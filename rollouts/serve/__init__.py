"""A model behind an address: programs that speak OpenAI's API get replies of an inference engine.

http_server.py    an HTTP/1.1 server on trio and h11: bounded in connections, sizes and times
chat_api.py       `ChatAPI`: OpenAI's chat completions on any engine that takes token ids
"""
