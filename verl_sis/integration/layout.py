"""Where the response tokens of a micro-batch stand in verl's packed layout.

verl packs the ``B`` sequences (prompt + response) of a micro-batch into one axis of ``N`` tokens. The logits at packed
position ``p`` predict token ``p + 1``, so response ``i`` with ``R_i`` tokens is predicted at the ``R_i`` positions that
start one before its first token. Under Ulysses sequence parallelism each rank holds one contiguous slice of the packed
axis, padded at the end to equal lengths.
"""

from dataclasses import dataclass

import torch
from tensordict import TensorDict

from verl_sis import verl_compat


@dataclass(frozen=True)
class ResponseLayout:
    """Positions of the response tokens of one micro-batch, for one sequence-parallel rank.

    Attributes:
        lengths: ``R_i`` of each response.
        starts: Packed position that predicts the first token of each response.
        positions: ``[R]`` int64, packed positions that predict the response tokens, response after response.
        token_ids: ``[R]`` the response tokens themselves.
        local_start: First packed position of this rank's slice.
        local_size: Number of positions of this rank's slice, padding included.
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    positions: torch.Tensor
    token_ids: torch.Tensor
    local_start: int
    local_size: int

    @classmethod
    def of(cls, data: TensorDict, local_size: int) -> "ResponseLayout":
        """Read the layout of a micro-batch.

        Args:
            data: Micro-batch as verl's engines see it; ``input_ids`` nested.
            local_size: Rows of logits that this rank holds.

        Returns:
            The layout.
        """
        token_ids, ends = verl_compat.packed(data, "input_ids")
        lengths = verl_compat.response_lengths(data)
        starts = [end - length - 1 for end, length in zip(ends, lengths, strict=True)]
        positions = torch.cat(
            [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        ).to(token_ids.device)
        return cls(
            lengths=tuple(lengths),
            starts=tuple(starts),
            positions=positions,
            token_ids=token_ids[positions + 1],
            local_start=verl_compat.sequence_parallel_rank() * local_size,
            local_size=local_size,
        )

    def local(self) -> torch.Tensor:
        """Bool ``[R]``: which response tokens are predicted by this rank's slice."""
        return (self.positions >= self.local_start) & (self.positions < self.local_start + self.local_size)

    def local_ranges(self) -> list[tuple[int, int]]:
        """``(start, stop)`` rows of this rank's logits for each response that has any there, in order."""
        ranges = []
        for start, length in zip(self.starts, self.lengths, strict=True):
            first = max(start - self.local_start, 0)
            last = min(start + length - self.local_start, self.local_size)
            if first < last:
                ranges.append((first, last))
        return ranges

    def local_rows(self) -> torch.Tensor:
        """Int64: rows of this rank's logits that predict response tokens, in order."""
        return self.positions[self.local()] - self.local_start

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """Spread per-token values of this rank's response tokens over its slice; other rows are 0.

        Args:
            values: ``[local R, ...]``, in the order of ``local_rows``.

        Returns:
            ``[local_size, ...]``.
        """
        spread = values.new_zeros((self.local_size, *values.shape[1:]))
        spread[self.local_rows()] = values
        return spread

    def collect(self, values: torch.Tensor) -> torch.Tensor:
        """Bring per-token values of all sequence-parallel ranks together.

        Without sequence parallelism nothing moves.

        Args:
            values: ``[local R, ...]``, in the order of ``local_rows``.

        Returns:
            ``[R, ...]``, in the order of ``positions``.
        """
        if verl_compat.sequence_parallel_size() == 1:
            return values
        return verl_compat.gather_packed(self.scatter(values))[self.positions]

    def pad(self, values: torch.Tensor, width: int) -> torch.Tensor:
        """Per-response rows of packed per-token values.

        Args:
            values: ``[R]``, in the order of ``positions``.
            width: ``T``, at least the longest response.

        Returns:
            ``[B, T]``, zero (False) beyond each response.
        """
        rows = torch.nn.utils.rnn.pad_sequence(list(values.split(self.lengths)), batch_first=True)
        return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))

    def unpad(self, values: torch.Tensor) -> torch.Tensor:
        """The inverse of ``pad``: per-token values out of padded rows.

        Args:
            values: ``[B, T]``.

        Returns:
            ``[R]``, in the order of ``positions``.
        """
        lengths = torch.tensor(self.lengths, device=values.device)
        return values[torch.arange(values.shape[1], device=values.device) < lengths[:, None]]
