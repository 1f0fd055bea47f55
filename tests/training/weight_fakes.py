"""An engine that is a server in all but the wire: it loads folders, keeps a prefix cache, and can be made to fail.

Its model is loaded by transformers and peft, which know nothing of what wrote the folder.
"""

from __future__ import annotations

import copy

import torch

from rollouts.errors import InferenceError
from rollouts.inference.base import Capabilities, Generation, VersionSpan
from rollouts.models.loading import load_hf_model


class FolderEngine:
    """`faults` hold for the next updates: `old` (nothing is loaded), `drop` and `flip` (a tensor's name), `stale`
    (the cache is kept), `base` (adapters are not used), `raw` (log-probabilities of temperature 1), `refuse`,
    `nan` (a tensor's name).
    """

    def __init__(self, base, folder, *, kind="full", name="server", context=96):
        self.base, self.name = str(base), name
        self.capabilities = Capabilities(
            owns_weights=True, weights_as="folder", weights_kind=kind, weights_folder=str(folder)
        )
        self.model = load_hf_model(self.base, device="cpu")
        self.context_tokens_max = context
        self.vocabulary_size = self.model.config.vocab_size
        self.faults, self.updates, self.version = {}, [], 0
        self.cached = {}  # prompt -> the model whose cache is kept

    def __repr__(self):
        return f"Fake at {self.name}"

    async def update_weights(self, update):
        self.updates.append(update)
        if "refuse" in self.faults:
            raise InferenceError("status 500: out of memory")
        self.version = update.version
        if "old" in self.faults:
            return
        old, self.model = self.model, load_hf_model(self.base if "base" in self.faults else update.path, device="cpu")
        state, before = self.model.state_dict(), old.state_dict()
        with torch.no_grad():
            if name := self.faults.get("drop"):
                state[name].copy_(before[name])
            if name := self.faults.get("nan"):
                state[name].fill_(float("nan"))
            if name := self.faults.get("flip"):
                state[name].view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 29)
        if "stale" not in self.faults:
            self.cached.clear()

    @torch.no_grad()
    def logprobs(self, model, tokens, temperature):
        logits = model(torch.tensor([tokens])).logits[0] / (temperature or 1.0)
        return logits.float().log_softmax(-1)

    async def score(self, tokens, temperature=1.0):
        table = self.logprobs(self.model, tokens, temperature)
        return [0.0, *(table[place - 1, tokens[place]].item() for place in range(1, len(tokens)))]

    async def generate(self, request):
        assert len(request.tokens) + request.max_tokens <= self.context_tokens_max
        model = self.cached.setdefault(tuple(request.tokens), copy.deepcopy(self.model))
        generator = torch.Generator().manual_seed(request.seed)
        tokens, logprobs = list(request.tokens), []
        for _ in range(request.max_tokens):
            last = self.logprobs(model, tokens, request.temperature)[-1]
            tokens.append(int(torch.multinomial(last.exp().nan_to_num(1.0), 1, generator=generator)))
            row = self.logprobs(model, tokens[:-1], 1.0)[-1] if "raw" in self.faults else last
            logprobs.append(row[tokens[-1]].item())
        sampled = tokens[len(request.tokens) :]
        return Generation(sampled, logprobs, "length", [VersionSpan(self.version, 0, len(sampled))])
