"""Random pairs of policies and what verl_sis.core makes of them, for tests that compare the two."""

from dataclasses import dataclass

import torch

from verl_sis.core.acceptance import acceptance_log_prob
from verl_sis.core.envelope import (
    Envelope,
    EnvelopeTerms,
    TopK,
    envelope_terms,
    log_normalizer,
    normalize_envelope,
    select_top_k,
)

CHUNK = 64


def logit_pair(
    rows: int, vocab_size: int, *, drift: float, seed: int, spread: float = 2.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[rows, vocab_size]`` of an old policy and of one that has drifted from it."""
    generator = torch.Generator().manual_seed(seed)
    old = spread * torch.randn(rows, vocab_size, generator=generator)
    return old, old + drift * torch.randn(rows, vocab_size, generator=generator)


def probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Softmax in float64."""
    return torch.softmax(logits.double(), dim=-1)


@dataclass
class Tested:
    """All that the core computes of sampled tokens ``y``."""

    top_k: TopK
    terms: EnvelopeTerms
    envelope: Envelope
    log_acceptance: torch.Tensor

    @property
    def acceptance(self) -> torch.Tensor:
        """a, float64."""
        return self.log_acceptance.double().exp()


def run_core(
    old: torch.Tensor, new: torch.Tensor, sampled: torch.Tensor, k: int, *, outside_top_k: str = "reject"
) -> Tested:
    """Old pass, update pass and acceptance, as the integration chains them."""
    top_k = select_top_k(old, sampled, k, chunk_tokens=CHUNK)
    terms = envelope_terms(new, top_k, sampled)
    log_acceptance = acceptance_log_prob(
        terms.sampled_logit - top_k.sampled_log_prob,
        terms.log_envelope,
        top_k.contains_sampled,
        outside_top_k=outside_top_k,
    )
    current = normalize_envelope(terms, log_normalizer(new, chunk_tokens=CHUNK))
    return Tested(top_k, terms, current, log_acceptance)


def run_core_on_vocabulary(old: torch.Tensor, new: torch.Tensor, k: int) -> Tested:
    """``run_core`` for one prefix (``[V]`` logits) and each token of the vocabulary as the sampled one."""
    vocab_size = old.shape[0]
    return run_core(old.expand(vocab_size, -1), new.expand(vocab_size, -1), torch.arange(vocab_size), k)
