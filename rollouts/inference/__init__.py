"""Inference engines: token ids in, token ids and logprobs out.

base.py       the interface of an engine: GenerateRequest, Generation, the Protocols (no torch)
chatting.py   the interface of an engine that takes messages instead of ids
suspend.py    suspends an episode in the middle of a reply, and resumes it
embedded/     the engine in this process: it shares the trainer's parameters and is reproducible by seed

Engines behind an address (vLLM, SGLang, any chat-completions API) are the package `rollouts_servers`, also by the name
`rollouts.inference.servers`.
"""
