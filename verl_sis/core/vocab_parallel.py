"""Top-K, envelope and residual mass when each rank holds only some columns of the logits.

Tensor parallelism splits the vocabulary: rank ``r`` of a group holds the logits of ``counts[r]`` consecutive token ids,
after those of the ranks before it. The last shards may be wider than that: Megatron pads the vocabulary so that all
shards have one width, and columns past a shard's count belong to no token. A shard may be padding alone, or empty.

Every function here takes the local logits ``[N, columns]``, returns on each rank what the function of the same name in
``verl_sis.core.envelope`` returns of the whole vocabulary, and lets no padded column enter. No rank ever sees another's
logits: per token there travel K candidates of each rank (top-K), three numbers of each rank (envelope) or one. An id
outside of a shard has the logit -inf there, so that neither a maximum nor a sum of exponentials notices it.

All ranks get bit-equal results, which they need, as each decides on its own which tokens are accepted: they reduce the
same gathered numbers in the same order, NaN included, and candidates of equal logit are ordered by shard. Maxima, and
with them acceptance, are exact; sums of exponentials are rounded in another order than on one rank. Equal logits at the
border of V_K may be chosen otherwise than on one rank; either choice is a top-K.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl_sis.core import envelope
from verl_sis.core.envelope import EnvelopeTerms, TopK
from verl_sis.errors import SisShapeError

NO_ID = -1
"""Stands where a shard has fewer candidates than are exchanged; never chosen."""


@dataclass(frozen=True)
class VocabShard:
    """The columns of the vocabulary that this rank holds. All ranks of the group must make each call.

    Attributes:
        counts: Token ids of each rank of the group, in the order of ids; padded columns are not counted.
        rank: This process's rank in the group.
        group: Process group that the vocabulary is split over; None for a whole vocabulary on one rank.
    """

    counts: tuple[int, ...]
    rank: int = 0
    group: Any = None

    @classmethod
    def whole(cls, vocab_size: int) -> "VocabShard":
        """All of the vocabulary on this rank; columns from ``vocab_size`` on are padding."""
        return cls((vocab_size,))

    @classmethod
    def split(cls, vocab_size: int, width: int, *, rank: int, size: int, group: Any) -> "VocabShard":
        """Equal ranges of ``width`` ids to each of ``size`` ranks, the last ones cut off at the end of the vocabulary.

        This is how Megatron shards a padded vocabulary, and how a DTensor shards any (with the width rounded up).

        Args:
            vocab_size: Number of token ids.
            width: Ids of a full rank.
            rank: This process's rank in the group.
            size: Ranks of the group.
            group: The process group.

        Raises:
            SisShapeError: If the ranks together do not hold the vocabulary.
        """
        if size * width < vocab_size:
            raise SisShapeError(f"{size} shards of {width} columns cannot hold a vocabulary of {vocab_size} tokens")
        counts = tuple(min(max(vocab_size - shard * width, 0), width) for shard in range(size))
        return cls(counts, rank, group if size > 1 else None)

    @property
    def vocab_size(self) -> int:
        """Token ids of all ranks together."""
        return sum(self.counts)

    @property
    def start(self) -> int:
        """Token id of this rank's first column."""
        return sum(self.counts[: self.rank])

    @property
    def columns(self) -> int:
        """Columns of this rank that belong to token ids."""
        return self.counts[self.rank]

    @torch.no_grad()
    def top_k_logits(
        self, logits: torch.Tensor, k: int, *, chunk_tokens: int, ranges: Sequence[tuple[int, int]] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The K largest logits of each row over all shards, and their token ids.

        Args:
            logits: ``[N, >= columns]`` local logits, any floating dtype.
            k: ``1 <= k <= vocab_size``.
            chunk_tokens: Rows worked on at a time.
            ranges: ``(start, stop)`` ranges of rows to look at, in order; all rows if None.

        Returns:
            ``(values [R, K] float32, ids [R, K] int32)``, by decreasing value.

        Raises:
            SisShapeError: If ``logits`` is too narrow or ``k`` lies outside ``[1, vocab_size]``.
        """
        if not 1 <= k <= self.vocab_size:
            raise SisShapeError(f"top-K must lie in [1, {self.vocab_size}], got {k}")
        own = self._own(logits)
        found = min(k, self.columns)
        parts = [(logits.new_zeros((0, found), dtype=torch.float32), logits.new_zeros((0, found), dtype=torch.int32))]
        for start, stop in [(0, len(own))] if ranges is None else ranges:
            if found:
                parts.append(envelope.top_k_logits(own[start:stop], found, chunk_tokens=chunk_tokens))
            else:
                parts.append((parts[0][0].new_zeros((stop - start, 0)), parts[0][1].new_zeros((stop - start, 0))))
        values, ids = (torch.cat(columns) for columns in zip(*parts, strict=True))
        ids += self.start
        return (values, ids) if len(self.counts) == 1 else self._merged(values, ids, k)

    def _merged(self, values: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The K largest of the candidates of all ranks; equal ones by rank, then in the order of their rank."""
        candidates = [min(k, count) for count in self.counts]
        missing = max(candidates) - values.shape[1]
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        ids = torch.nn.functional.pad(ids, (0, missing), value=NO_ID)
        by_rank = self._gathered(torch.cat([values.view(torch.int32), ids], dim=1))
        values_by_rank, ids_by_rank = by_rank.split(max(candidates), dim=-1)
        columns = [(rank, slice(0, count)) for rank, count in enumerate(candidates)]
        all_values = torch.cat([values_by_rank[rank, :, kept].view(torch.float32) for rank, kept in columns], dim=1)
        all_ids = torch.cat([ids_by_rank[rank, :, kept] for rank, kept in columns], dim=1)
        order = all_values.argsort(dim=1, descending=True, stable=True)[:, :k]
        return all_values.gather(1, order), all_ids.gather(1, order)

    @torch.no_grad()
    def gather_logits(self, logits: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Logits at given ids, in float32.

        Args:
            logits: ``[N, >= columns]`` local logits.
            ids: ``[R]`` or ``[R, K]`` token ids, of any shard.
            rows: ``[R]`` row of ``logits`` for each entry of ``ids``; all rows in order if None.

        Returns:
            float32 of the shape of ``ids``; -inf for an id that is in no shard.
        """
        return self._gathered(self._local_logits(logits, ids, rows)).amax(dim=0)

    @torch.no_grad()
    def log_normalizer(
        self, logits: torch.Tensor, rows: torch.Tensor | None = None, *, chunk_tokens: int
    ) -> torch.Tensor:
        """Log-sum-exp over the vocabulary in float32, without padded columns.

        Args:
            logits: ``[N, >= columns]`` local logits.
            rows: ``[R]`` rows to sum over; all in order if None.
            chunk_tokens: Rows converted to float32 at a time.

        Returns:
            ``[R]`` float32.
        """
        own = self._own(logits)
        if self.columns:
            local = envelope.log_normalizer(own, rows, chunk_tokens=chunk_tokens)
        else:
            count = len(own) if rows is None else len(rows)
            local = own.new_full((count,), -torch.inf, dtype=torch.float32)
        return local if len(self.counts) == 1 else torch.logsumexp(self._gathered(local), dim=0)

    @torch.no_grad()
    def envelope_terms(
        self, logits: torch.Tensor, top_k: TopK, sampled_ids: torch.Tensor, rows: torch.Tensor | None = None
    ) -> EnvelopeTerms:
        """Envelope and top-K mass of the current policy at the old policy's top-K.

        Args:
            logits: ``[N, >= columns]`` local logits of the current policy.
            top_k: Top-K of the old policy at ``R`` tokens, the same on all ranks.
            sampled_ids: ``[R]`` ids of the sampled tokens.
            rows: ``[R]`` row of ``logits`` that predicts each of the tokens; all rows in order if None.

        Returns:
            The unnormalised terms, ``[R]`` each.
        """
        if len(self.counts) == 1:
            return envelope.envelope_terms(self._own(logits), top_k, sampled_ids, rows)
        current = self._local_logits(logits, top_k.ids, rows)
        usable = top_k.log_prob > envelope.FILTERED_LOG_PROB
        local = torch.stack(
            [
                torch.where(usable, current - top_k.log_prob, -torch.inf).amax(dim=-1),
                torch.logsumexp(torch.where(usable, current, -torch.inf), dim=-1),
                self._local_logits(logits, sampled_ids, rows),
            ]
        )
        log_envelope, log_mass, sampled_logit = self._gathered(local).unbind(dim=1)
        return EnvelopeTerms(
            log_envelope=log_envelope.amax(dim=0),
            log_mass=torch.logsumexp(log_mass, dim=0),
            sampled_logit=sampled_logit.amax(dim=0),
        )

    def _own(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.ndim != 2 or logits.shape[1] < self.columns:
            raise SisShapeError(f"logits must be [N, at least {self.columns}] on this rank, got {tuple(logits.shape)}")
        return logits[:, : self.columns]

    def _local_logits(self, logits: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Float32 logits at the ids of this rank, -inf at those of others."""
        own = self._own(logits)
        column = ids.long() - self.start
        inside = (column >= 0) & (column < self.columns)
        if not self.columns:
            return torch.full(ids.shape, -torch.inf, dtype=torch.float32, device=logits.device)
        return torch.where(inside, envelope.gather_logits(own, column.where(inside, 0), rows), -torch.inf)

    def _gathered(self, local: torch.Tensor) -> torch.Tensor:
        # Gathered, not reduced: the last reduction is then everyone's own, in one order and with torch's treatment of
        # NaN, which the reductions of communication libraries do not share.
        if len(self.counts) == 1 or not local.numel():
            return local.expand(len(self.counts), *local.shape)
        local = local.contiguous()
        parts = [torch.empty_like(local) for _ in self.counts]
        torch.distributed.all_gather(parts, local, group=self.group)
        return torch.stack(parts)


def local_columns(logits: Any) -> tuple[torch.Tensor, VocabShard]:
    """This rank's columns of a DTensor that is sharded over the vocabulary, without gathering it.

    Args:
        logits: DTensor ``[N, V]``, sharded over its last dimension along at most one dimension of its mesh and
            replicated along the others.

    Returns:
        The local tensor ``[N, columns]``, and which columns these are.

    Raises:
        SisShapeError: If rows are sharded, values are partial sums, or several mesh dimensions share the vocabulary.
    """
    from torch.distributed.tensor import Replicate

    sharded = [dim for dim, placement in enumerate(logits.placements) if placement != Replicate()]
    vocab_size = logits.shape[-1]
    if not sharded:
        return logits.to_local(), VocabShard.whole(vocab_size)
    if len(sharded) > 1 or not logits.placements[sharded[0]].is_shard(logits.ndim - 1):
        raise SisShapeError(f"expected logits sharded over the vocabulary alone, found placements {logits.placements}")
    mesh, dim = logits.device_mesh, sharded[0]
    size = mesh.size(dim)
    width = -(-vocab_size // size)
    return logits.to_local(), VocabShard.split(
        vocab_size, width, rank=mesh.get_local_rank(dim), size=size, group=mesh.get_group(dim)
    )
