"""Work on several ranks, under the module name of the first notes."""

from __future__ import annotations

from rollouts.training.backends.pytorch_factory import is_sharded as is_sharded
from rollouts.training.backends.ranks import gather_ranks as gather_ranks
from rollouts.training.backends.rendezvous import place_of_this_process as place_of_this_process
