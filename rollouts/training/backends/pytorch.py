"""A backend for your own model, under the module name of the first notes."""

from __future__ import annotations

from rollouts.training.backends.pytorch_factory import PyTorchTrainingBackend as PyTorchTrainingBackend
