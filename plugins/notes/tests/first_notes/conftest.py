"""What the tests of the first notes share: `import note_blocks`, and one small model for each module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for `import note_blocks`
sys.path.append(str(Path(__file__).parents[4] / "tests" / "servers"))


@pytest.fixture(scope="module")
def tokenizer():
    from rollouts.models.loading import load_tokenizer

    return load_tokenizer("tiny")


@pytest.fixture
def model():
    """A new copy, because tests train it."""
    from rollouts.training import load_hf_model

    return load_hf_model("tiny", device="cpu")
