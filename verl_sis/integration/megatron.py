"""SIS on verl's Megatron engine: what the rows and columns of its logits are.

The engine calls the loss function's logits hook on the last pipeline stage only, with ``[1, n, V / TP]`` (packed, THD)
or ``[B, S, V / TP]`` (padded, BSHD) logits, ``n`` or ``S`` being this context-parallel rank's share. Every
tensor-parallel rank takes part in the exchanges of ``verl_sis.core.vocab_parallel`` and gets the same result; every
context-parallel rank looks at its own rows, and the top-K of the old policy is then added up over them, so that each
holds that of all tokens and the update may share the rows otherwise than the old pass did.

The output layer is padded so that it splits evenly, and verl's log-probs count the padded columns. SIS does not: where
there are any, the normaliser of both policies is its own, over token ids only.
"""

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from verl_sis import verl_compat
from verl_sis.core.vocab_parallel import VocabShard
from verl_sis.errors import SisStateError
from verl_sis.integration.layout import ResponseLayout
from verl_sis.integration.live_logits import LiveLogits

_ELSEWHERE = -1
"""Row of a response token that is predicted on another context-parallel rank."""


@dataclass(frozen=True)
class MegatronLayout(ResponseLayout):
    """Positions of the response tokens of one micro-batch, for one context-parallel rank.

    Attributes:
        rows: ``[R]`` int64, row of this rank's logits that predicts each response token, or -1.
    """

    rows: torch.Tensor

    @classmethod
    def of_rows(cls, data: TensorDict, packed_index: torch.Tensor) -> "MegatronLayout":
        """Read the layout of a micro-batch.

        Args:
            data: Micro-batch as verl's engine sees it; ``input_ids`` nested.
            packed_index: ``[n]`` packed position of the token in each row of this rank's logits, -1 for padding.

        Returns:
            The layout.
        """
        layout = ResponseLayout.of(data, local_size=len(packed_index))
        holds = packed_index >= 0
        tokens, _ = verl_compat.packed(data, "input_ids")
        row_of = packed_index.new_full((len(tokens),), _ELSEWHERE)
        row_of[packed_index[holds]] = holds.nonzero().squeeze(1)
        return cls(**vars(layout), rows=row_of[layout.positions])

    def local(self) -> torch.Tensor:
        """Bool ``[R]``: which response tokens are predicted by this rank's rows."""
        return self.rows != _ELSEWHERE

    def local_rows(self) -> torch.Tensor:
        """Int64: rows of this rank's logits that predict response tokens, in order."""
        return self.rows[self.local()]

    def local_ranges(self) -> list[tuple[int, int]]:
        """``(start, stop)`` runs of consecutive rows, in the order of ``local_rows``."""
        rows = self.local_rows()
        if not len(rows):
            return []
        ends = (rows.diff() != 1).nonzero().squeeze(1)
        first, last = torch.cat([rows[:1], rows[ends + 1]]), torch.cat([rows[ends], rows[-1:]])
        return list(zip(first.tolist(), (last + 1).tolist(), strict=True))

    def collect(self, values: torch.Tensor) -> torch.Tensor:
        """Bring per-token values of all context-parallel ranks together, each of which has some of the tokens.

        Args:
            values: ``[local R, ...]``, in the order of ``local_rows``.

        Returns:
            ``[R, ...]``, in the order of ``positions``.
        """
        spread = values.new_zeros((len(self.rows), *values.shape[1:]))
        spread[self.local()] = values
        return verl_compat.sum_over_context_parallel(spread)


class MegatronLook:
    """Reads the logits of one Megatron engine."""

    def __init__(self, engine: Any) -> None:
        """Remember what does not change.

        Args:
            engine: verl's Megatron engine, built.
        """
        self._vocab_size = verl_compat.vocab_size(engine.model_config)
        self._cp_layout = verl_compat.context_parallel_layout(engine)

    def __call__(self, student_logits: torch.Tensor, data: TensorDict, data_format: str | None = None) -> LiveLogits:
        """What these logits are.

        Args:
            student_logits: ``[1, n, V / TP]`` or ``[B, S, V / TP]``, temperature-scaled.
            data: The micro-batch.
            data_format: ``thd`` or ``bshd``.

        Returns:
            The logits, one row per token position of this rank.

        Raises:
            SisStateError: If the rows are not those that verl's own layout gives.
        """
        if data_format not in ("thd", "bshd"):
            raise SisStateError(f"verl's Megatron engine says data_format={data_format!r}, expected thd or bshd")
        logits = student_logits.flatten(0, 1)
        index = verl_compat.megatron_rows(data, data_format, self._cp_layout)
        if len(index) != len(logits):
            raise SisStateError(
                f"verl's Megatron engine hands over {len(logits)} rows of logits, expected {len(index)} by its own "
                f"layout ({data_format}, {self._cp_layout}): top-K would be taken for the wrong tokens"
            )
        rank, size, group = verl_compat.tensor_parallel()
        width = logits.shape[1]
        padded = size * width > self._vocab_size
        return LiveLogits(
            values=logits,
            layout=MegatronLayout.of_rows(data, index),
            vocabulary=VocabShard.split(self._vocab_size, width, rank=rank, size=size, group=group),
            shape=tuple(student_logits.shape[:2]),
            counts_padding=padded,
            exact_log_probs=not padded,
        )
