"""The logits of a micro-batch as an engine hands them to the loss function: whose rows and whose columns they are."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict

from verl_sis import verl_compat
from verl_sis.core.vocab_parallel import VocabShard
from verl_sis.integration.layout import ResponseLayout


@dataclass(frozen=True)
class LiveLogits:
    """Temperature-scaled logits of one micro-batch on this rank.

    Attributes:
        values: ``[n, V']``, this rank's rows and columns.
        layout: Which rows predict response tokens.
        vocabulary: Which token ids the columns are.
        shape: ``[1, n]``, or ``[B, S]`` with ``B * S = n``: how the engine lays out rows and expects results.
        counts_padding: Whether verl's log-probs sum over padded columns too, which belong to no token.
        exact_log_probs: Whether verl's log-probs are float32-accurate and of the normaliser of ``vocabulary``.
    """

    values: torch.Tensor
    layout: ResponseLayout
    vocabulary: VocabShard
    shape: tuple[int, ...]
    counts_padding: bool
    exact_log_probs: bool

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Per-token values of this rank's response tokens, laid out as the engine expects them; other rows are 0.

        Args:
            values: ``[local R]``, in the order of ``layout.local_rows``.
        """
        return self.layout.scatter(values).view(self.shape)


Look = Callable[[torch.Tensor, TensorDict, str | None], LiveLogits]
"""What an engine's logits are: called with ``student_logits``, the micro-batch, and ``data_format`` if it gives one."""


def look_at_fsdp(student_logits: torch.Tensor, data: TensorDict, data_format: str | None = None) -> LiveLogits:
    """Logits of verl's FSDP engines: ``[1, n, V]``, the whole vocabulary, packed rows or a Ulysses slice of them."""
    logits = student_logits.squeeze(0)
    return LiveLogits(
        values=logits,
        layout=ResponseLayout.of(data, local_size=logits.shape[0]),
        vocabulary=VocabShard.whole(logits.shape[1]),
        shape=(1, logits.shape[0]),
        counts_padding=False,
        exact_log_probs=verl_compat.log_probs_keep_float32(logits.dtype, logits.device),
    )
