"""Inference engines: token ids in, token ids and logprobs out.

base.py       the seam: GenerateRequest, Generation, the Protocol of an engine (no torch)
chatting.py   the seam of engines that take messages instead of ids
carried.py    the engine as one episode sees it, where that can be stopped in mid-reply and go on later
embedded/     the engine in this process: shares the trainer's parameters, reproducible by seed
servers/      engines behind an address: vLLM, SGLang, any chat-completions API
"""
