"""Inference engines: token ids in, token ids and logprobs out.

base.py       the seam: GenerateRequest, Generation, the Protocol of an engine (no torch)
chatting.py   the seam of engines that take messages instead of ids
suspend.py    suspend an episode in the middle of a reply, and resume it
embedded/     the engine in this process: shares the trainer's parameters, reproducible by seed
servers/      engines behind an address: vLLM, SGLang, any chat-completions API
"""
