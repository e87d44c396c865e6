"""Float32 log-probabilities of whole distributions, some rows of the logits at a time."""

from collections.abc import Iterator

import torch

from verl_sis.errors import SisShapeError


@torch.no_grad()
def log_probs_in_chunks(
    logits: torch.Tensor, rows: torch.Tensor, *, chunk_tokens: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Log-softmax of some rows of logits in float32, without an autograd graph.

    Args:
        logits: ``[N, V]`` temperature-scaled logits, any floating dtype.
        rows: ``[R]`` rows of ``logits``, in any order.
        chunk_tokens: Rows worked on at a time. A caller that lets go of each chunk needs three times
            ``chunk_tokens * V * 4`` bytes.

    Yields:
        The range of ``rows``, and ``[n, V]`` float32 log-probs there, in nats. At least one range, so that results can
        be concatenated; it is empty if ``rows`` is.

    Raises:
        SisShapeError: If ``logits`` is not two-dimensional.
    """
    if logits.ndim != 2:
        raise SisShapeError(f"logits must be [N, V], got {tuple(logits.shape)}")
    for start in range(0, max(len(rows), 1), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        yield part, torch.log_softmax(logits[rows[part]].float(), dim=-1)


def entropy(log_prob: torch.Tensor) -> torch.Tensor:
    """Shannon entropy ``-sum over v of pi(v) log pi(v)``, in nats; tokens of probability 0 add nothing.

    Args:
        log_prob: ``[..., V]`` normalised log-probs.

    Returns:
        ``[...]`` in the dtype of ``log_prob``; NaN where a log-prob is NaN.
    """
    return torch.special.entr(torch.exp(log_prob)).sum(dim=-1)
