"""`Sample` with tensors: the sample of rollouts, which also takes and shows `input_ids`, `labels` and `loss_mask`.

    Sample(input_ids=torch.tensor(tokens), labels=torch.tensor(tokens), loss_mask=torch.tensor(mask))
    Sample(prompt="2 + 2?", response="4", tokens=tokens, loss_mask=mask, reward=1.0)

Not here: the fields (`rollouts.types`), and padding (`batches`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollouts import types
from rollouts.errors import TrainingError

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
"""A label of this value is not trained, as in transformers."""


@dataclass(init=False)
class Sample(types.Sample):
    """A `rollouts.Sample` that may be made of tensors [L]: `input_ids`, and optionally `labels` and `loss_mask`.

    Labels are the token ids, not shifted. A label of -100 means a `loss_mask` of 0. Without a `loss_mask`, all other
    tokens are trained. A sample that is made of tensors has a tensor as `loss_mask`.

    Raises TrainingError if labels differ from the token ids, or if the lengths differ.

    >>> import torch
    >>> Sample(input_ids=torch.tensor([5, 6, 7]), labels=torch.tensor([-100, 6, 7])).loss_mask
    tensor([0., 1., 1.])

    Args:
        advantages: the advantage of the sample, or of each token; for `compute_grpo_loss`
    """

    advantages: Any = None

    def __init__(
        self, *fields: Any, input_ids: Any = None, labels: Any = None, advantages: Any = None, **named: Any
    ) -> None:
        super().__init__(*fields, **named)
        self.advantages = advantages
        if input_ids is not None:
            self.tokens, self.loss_mask = _streams(input_ids, labels, named.get("loss_mask"))

    @property
    def input_ids(self) -> Tensor:
        """The tokens [L] int64."""
        import torch

        return torch.tensor(self.tokens, dtype=torch.int64)

    @property
    def labels(self) -> Tensor:
        """The same as `input_ids`: a loss of this package shifts them itself."""
        return self.input_ids


RLSample = Sample
"""The first notes' second name of `Sample`: it has `reward`, `rollout_log_probs` and `advantages`."""


def _streams(input_ids: Any, labels: Any, loss_mask: Any) -> tuple[list[int], Any]:
    """The tokens [L] and the mask [L] as a tensor. Raises TrainingError."""
    import torch

    ids = torch.as_tensor(input_ids)
    targets = ids if labels is None else torch.as_tensor(labels)
    mask = torch.ones(ids.shape) if loss_mask is None else torch.as_tensor(loss_mask, dtype=torch.float32)
    if ids.dim() != 1 or not ids.shape == targets.shape == mask.shape:
        shapes = f"input_ids {list(ids.shape)}, labels {list(targets.shape)}, loss_mask {list(mask.shape)}"
        raise TrainingError(f"a sample has one number for each token, all [L]; got {shapes}")
    mask = mask * (targets != IGNORED)
    wrong = ((targets != ids) & (mask > 0)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        differ = f"label {at} is {int(targets[at])} and input_ids {at} is {int(ids[at])}"
        raise TrainingError(f"{differ}; labels are the token ids, not shifted, or {IGNORED} where nothing is trained")
    return ids.tolist(), mask


def with_lists(sample: types.Sample) -> types.Sample:
    """The sample with lists as `tokens` and `loss_mask`, as the loops need it."""
    tokens, mask = sample.tokens, sample.loss_mask
    if isinstance(tokens, list) and isinstance(mask, list):
        return sample
    lists = {"tokens": [int(each) for each in tokens], "loss_mask": [float(each) for each in mask]}
    return dataclasses.replace(sample, **lists)


def with_tensors(samples: Sequence[types.Sample]) -> list[Sample]:
    """The samples with tensors: `input_ids`, `labels` and `loss_mask` [L]; and with a grade."""
    import torch

    graded = map(with_grade, samples)
    known = [{field.name: getattr(each, field.name) for field in dataclasses.fields(each)} for each in graded]
    return [Sample(**each | {"loss_mask": torch.as_tensor(each["loss_mask"], dtype=torch.float32)}) for each in known]


def with_grade(sample: types.Sample) -> types.Sample:
    """The sample whose metadata has `correct`. If it has none: whether the reward, such as an environment's, is 1 or
    more.
    """
    return dataclasses.replace(sample, metadata={"correct": (sample.reward or 0.0) >= 1.0, **sample.metadata})
