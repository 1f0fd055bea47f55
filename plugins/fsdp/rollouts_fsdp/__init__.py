"""The sharded training backend, `--training fsdp`: torch's FSDP2 over several GPUs or machines.

backend.py     the backend: its settings, and how a model is sharded
ranks.py       how ranks start and join; the executor on rank 0, and the workers on the other ranks
rendezvous.py  a store in which ranks meet, and signed messages in it
heartbeats.py  which rank failed
rank.py        a rank above 0: composes the same run as rank 0, and runs rank 0's commands

A run finds the backend by its entry point of `rollouts.training`. The core does not import this package. Under a
launcher it opens `rank.py` for ranks above 0 if the environments have workers.
"""
