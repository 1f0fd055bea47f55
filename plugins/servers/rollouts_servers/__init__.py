"""Engines behind an address: vLLM, SGLang, any chat-completions API.

vllm.py sglang.py  one kind of server each: its requests (`Dialect`), and the command that starts one
openai.py       any chat-completions API, for evaluation
options.py      the settings of servers, and the pool that they describe
server_pool.py  several servers as one engine: it chooses a server for each request
server.py       one server: its requests, its weights, and its state
dialect.py      the interface to one kind of server
checks.py       what a run requires of a server, and checks of requests, replies and updates
process.py      the process of a server that we start, with port and log; `rollouts.supervisor` ends it with our process
broadcast.py    full weights over torch.distributed
http.py         the HTTP clients: connections, limits, retries, failures
spending.py     what requests to an API have cost, and replies that are kept
vllm_worker/    a worker extension that a vLLM server on a CPU needs to load weights

A run finds the engines by the entry points of `rollouts.inference`. The core does not import this package.
"""
