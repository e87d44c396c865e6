"""The logits of a micro-batch as an engine hands them to the loss function: whose rows and whose columns they are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from verl_sis import verl_compat
from verl_sis.core.linear_head import LinearHead, Logits
from verl_sis.core.vocab_parallel import VocabShard
from verl_sis.integration.layout import ResponseLayout


@dataclass(frozen=True)
class LiveLogits:
    """Temperature-scaled logits of one micro-batch on this rank.

    Attributes:
        values: ``[n, V']``, this rank's rows and columns; with fused kernels the head that makes them.
        layout: Which rows predict response tokens.
        vocabulary: Which token ids the columns are.
        shape: ``[1, n]``, or ``[B, S]`` with ``B * S = n``: how the engine lays out rows and expects results.
        counts_padding: Whether verl's log-probs sum over padded columns too, which belong to no token.
        exact_log_probs: Whether verl's log-probs are float32-accurate and of the normaliser of ``vocabulary``.
    """

    values: Logits
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


Look = Callable[[Any, TensorDict, str | None], LiveLogits]
"""What an engine's logits are: called with ``student_logits``, the micro-batch, and ``data_format`` if it gives one."""


def look_at_fsdp(student_logits: Logits, data: TensorDict, data_format: str | None = None) -> LiveLogits:
    """Logits of verl's FSDP engines: ``[1, n, V]``, the whole vocabulary, packed rows or a Ulysses slice of them.

    With fused kernels a head of ``n`` rows instead, whose normaliser is always taken: kernels round as they please.
    """
    logits = verl_compat.packed_rows(student_logits)
    return LiveLogits(
        values=logits,
        layout=ResponseLayout.of(data, local_size=logits.shape[0]),
        vocabulary=VocabShard.whole(logits.shape[1]),
        shape=(1, logits.shape[0]),
        counts_padding=False,
        exact_log_probs=not isinstance(logits, LinearHead)
        and verl_compat.log_probs_keep_float32(logits.dtype, logits.device),
    )
