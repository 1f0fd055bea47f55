"""Engines behind an address.

server_pool.py  several servers as one engine: it chooses a server for each request
server.py       one server: its requests, its weights, and its state
dialect.py      the interface to one kind of server: `vllm.py` and `sglang.py`
vllm_worker/    a worker extension that a vLLM server on a CPU needs to load weights
checks.py       what a run requires of a server, and checks of requests, replies and updates
http.py         the HTTP clients: connections, limits, retries, failures
process.py      the process of a server that we start, with port and log; `rollouts.supervisor` ends it with our process
options.py      the settings, and the pool that they describe
openai.py       any chat-completions API, for evaluation
"""
