"""Logits of a linear LM head some rows at a time, and what SIS takes from logits that exist as a whole or in blocks.

Fused kernels never materialise the logits ``hidden @ weight.T / temperature``. ``LinearHead`` computes them in blocks
of rows: the product in the dtype that its inputs (or autocast) say, the division in that dtype, all after it in
float32. A block is let go before the next one is made, so the extra memory is one block of logits, ``chunk_tokens * V``
numbers of that dtype, beside the ``[R, K]`` results and what the functions of ``envelope`` need for a block.

The functions here take either form. For logits that exist they are one block, and nothing is copied.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from verl_sis.core.envelope import EnvelopeTerms, TopK
from verl_sis.core.log_probs import log_probs_in_chunks
from verl_sis.core.vocab_parallel import VocabShard
from verl_sis.errors import SisShapeError

Ranges = Sequence[tuple[int, int]]
"""``(start, stop)`` rows, ascending and disjoint, that predict the ``R`` tokens at hand, one after the other."""


@dataclass(frozen=True)
class LinearHead:
    """The logits ``hidden @ weight.T / temperature``, not materialised.

    Attributes:
        hidden: ``[N, H]`` final hidden states, any floating dtype; its graph is not used.
        weight: ``[V, H]`` weight of the LM head.
        temperature: Sampling temperature.
        chunk_tokens: Rows of a block. Blocks start at multiples of it, whichever rows are asked for, so that a row is
            always multiplied in the same block: a matrix product of another height may round differently.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    temperature: float
    chunk_tokens: int

    def __post_init__(self) -> None:
        """Check the shapes.

        Raises:
            SisShapeError: If they are not those of a head.
        """
        if self.hidden.ndim != 2 or self.weight.ndim != 2 or self.hidden.shape[1] != self.weight.shape[1]:
            raise SisShapeError(
                f"expected hidden states [N, H] and a weight [V, H], found {tuple(self.hidden.shape)} and "
                f"{tuple(self.weight.shape)}"
            )

    @property
    def shape(self) -> torch.Size:
        """``[N, V]`` of the logits."""
        return torch.Size((self.hidden.shape[0], self.weight.shape[0]))

    @torch.no_grad()
    def block(self, start: int, stop: int) -> torch.Tensor:
        """Logits ``[stop - start, V]`` of some rows, in the dtype of the product."""
        return (self.hidden[start:stop] @ self.weight.t()).div_(self.temperature)


Logits = torch.Tensor | LinearHead
"""Temperature-scaled logits ``[N, V]``, materialised or not."""


@dataclass(frozen=True)
class OldRows:
    """What the old pass takes from the logits of ``R`` tokens.

    Attributes:
        values: ``[R, K]`` float32, largest logits.
        ids: ``[R, K]`` int32, their token ids.
        sampled_logit: ``[R]`` float32.
        log_normalizer: ``[R]`` float32 log-sum-exp, or None if it was not asked for.
    """

    values: torch.Tensor
    ids: torch.Tensor
    sampled_logit: torch.Tensor
    log_normalizer: torch.Tensor | None


def tokens_of(top_k: TopK, index: torch.Tensor | slice) -> TopK:
    """The top-K of some of the tokens, in the order of ``index``."""
    return TopK(top_k.ids[index], top_k.log_prob[index], top_k.sampled_log_prob[index], top_k.contains_sampled[index])


@torch.no_grad()
def old_rows(
    logits: Logits,
    ranges: Ranges,
    sampled_ids: torch.Tensor,
    k: int,
    *,
    normalize: bool,
    chunk_tokens: int,
    vocabulary: VocabShard | None = None,
) -> OldRows:
    """Top-K logits, the sampled token's own, and the normaliser of the old policy.

    Args:
        logits: ``[N, V]`` of the old policy.
        ranges: Rows that predict the R tokens.
        sampled_ids: ``[R]`` the tokens.
        k: Size of V_K.
        normalize: Whether to take the log-sum-exp over the vocabulary.
        chunk_tokens: Rows worked on at a time.
        vocabulary: Which token ids the columns of ``logits`` are; all, in order, if None.

    Returns:
        The columns.

    Raises:
        SisShapeError: If the shapes do not fit or ``k`` lies outside ``[1, V]``.
    """
    _check_rows(ranges, sampled_ids)
    vocabulary = vocabulary or VocabShard.whole(logits.shape[1])
    values, ids, sampled, normalizer = [], [], [], []
    for block in _blocks(logits, ranges):
        # Run by run of consecutive rows, so no row of logits is copied.
        largest = vocabulary.top_k_logits(block.logits, k, chunk_tokens=chunk_tokens, ranges=block.ranges)
        values.append(largest[0])
        ids.append(largest[1])
        rows = block.rows()
        sampled.append(vocabulary.gather_logits(block.logits, sampled_ids[block.tokens], rows))
        if normalize:
            normalizer.append(vocabulary.log_normalizer(block.logits, rows, chunk_tokens=chunk_tokens))
        del block  # before the next one is made
    return OldRows(
        values=torch.cat(values),
        ids=torch.cat(ids),
        sampled_logit=torch.cat(sampled),
        log_normalizer=torch.cat(normalizer) if normalize else None,
    )


@torch.no_grad()
def current_rows(
    logits: Logits,
    ranges: Ranges,
    top_k: TopK,
    sampled_ids: torch.Tensor,
    *,
    normalized: torch.Tensor | None,
    chunk_tokens: int,
    vocabulary: VocabShard | None = None,
) -> tuple[EnvelopeTerms, torch.Tensor | None]:
    """Envelope and top-K mass of the current policy at the old policy's top-K, and its normaliser where wanted.

    Args:
        logits: ``[N, V]`` of the current policy.
        ranges: Rows that predict the R tokens.
        top_k: Top-K of the old policy at the R tokens.
        sampled_ids: ``[R]`` the tokens.
        normalized: Bool ``[R]``, the tokens whose log-sum-exp is taken; None for none.
        chunk_tokens: Rows worked on at a time.
        vocabulary: Which token ids the columns of ``logits`` are; all, in order, if None.

    Returns:
        The unnormalised terms, and ``[R]`` float32 log-sum-exps (0 where not taken), or None.

    Raises:
        SisShapeError: If the shapes do not fit.
    """
    _check_rows(ranges, sampled_ids)
    vocabulary = vocabulary or VocabShard.whole(logits.shape[1])
    terms, normalizer = [], []
    for block in _blocks(logits, ranges):
        rows = block.rows()
        of_block = vocabulary.envelope_terms(
            block.logits, tokens_of(top_k, block.tokens), sampled_ids[block.tokens], rows
        )
        terms.append(of_block)
        if normalized is not None:
            chosen = normalized[block.tokens]
            taken = vocabulary.log_normalizer(block.logits, rows[chosen], chunk_tokens=chunk_tokens)
            normalizer.append(torch.zeros_like(of_block.log_mass).masked_scatter_(chosen, taken))
        del block  # before the next one is made
    joined = EnvelopeTerms(
        log_envelope=torch.cat([part.log_envelope for part in terms]),
        log_mass=torch.cat([part.log_mass for part in terms]),
        sampled_logit=torch.cat([part.sampled_logit for part in terms]),
    )
    return joined, None if normalized is None else torch.cat(normalizer)


@torch.no_grad()
def log_probs_of_rows(logits: Logits, rows: torch.Tensor, *, chunk_tokens: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """``log_probs_in_chunks`` for logits in either form.

    Args:
        logits: ``[N, V]``.
        rows: ``[R]`` rows of ``logits``, ascending.
        chunk_tokens: Rows worked on at a time.

    Yields:
        The range of ``rows``, and ``[n, V]`` float32 log-probs there; at least one range, empty if ``rows`` is.
    """
    if isinstance(logits, torch.Tensor):
        yield from log_probs_in_chunks(logits, rows, chunk_tokens=chunk_tokens)
        return
    if not len(rows):
        yield from log_probs_in_chunks(logits.block(0, 0), rows, chunk_tokens=chunk_tokens)
    first = 0
    starts, counts = (rows // logits.chunk_tokens).unique_consecutive(return_counts=True)
    for number, count in zip(starts.tolist(), counts.tolist(), strict=True):
        start = number * logits.chunk_tokens
        block = logits.block(start, min(start + logits.chunk_tokens, logits.shape[0]))
        inside = rows[first : first + count] - start
        for part, log_prob in log_probs_in_chunks(block, inside, chunk_tokens=chunk_tokens):
            yield slice(first + part.start, min(first + part.stop, first + count)), log_prob
        first += count
        del block  # before the next one is made


@dataclass(frozen=True)
class _Block:
    """Some rows of the logits, and which of the R tokens they predict."""

    logits: torch.Tensor
    ranges: Ranges
    """Rows of ``logits``."""
    tokens: slice

    def rows(self) -> torch.Tensor:
        """Int64, the rows of ``ranges`` one by one."""
        device = self.logits.device
        empty = torch.arange(0, device=device)
        return torch.cat([empty, *(torch.arange(start, stop, device=device) for start, stop in self.ranges)])


def _blocks(logits: Logits, ranges: Ranges) -> Iterator[_Block]:
    """The blocks that hold rows of ``ranges``, in order; one of no rows comes first, so that there is always one."""
    if isinstance(logits, torch.Tensor):
        yield _Block(logits, ranges, slice(0, _count(ranges)))
        return
    yield _Block(logits.block(0, 0), [], slice(0, 0))
    first = 0
    for start in range(0, logits.shape[0], logits.chunk_tokens):
        end = min(start + logits.chunk_tokens, logits.shape[0])
        cut = [(max(low, start) - start, min(high, end) - start) for low, high in ranges if low < end and high > start]
        if cut:
            tokens = slice(first, first + _count(cut))
            yield _Block(logits.block(start, end), cut, tokens)
            first = tokens.stop


def _count(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _check_rows(ranges: Ranges, sampled_ids: torch.Tensor) -> None:
    if sampled_ids.shape != (_count(ranges),):
        raise SisShapeError(f"sampled_ids must be {(_count(ranges),)}, one per row, got {tuple(sampled_ids.shape)}")
