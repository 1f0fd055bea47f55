"""Engines behind an address.

http.py        the clients: connections, limits, retries, failures
dialect.py     what one kind of server is asked, by a process group too: `vllm.py`, `sglang.py` and `sglang_wire.py`
vllm_worker/   what a vLLM server on a CPU imports so that it can load weights
checks.py      what a run expects of a server, and what is wrong with one
server.py      one server: its requests, its weights and its incarnation, in one state at a time
pool.py        several servers as one engine: it routes
process.py     a server's process, its port and log; `rollouts.supervisor` ends it with this process
options.py     settings, and where servers come from: URLs, or started here
openai.py      any chat-completions API, for evaluation
"""
