"""Which responses and contexts of a rollout are dumped: decided before its first update, whatever the layout."""

from dataclasses import dataclass

import torch
from tensordict import TensorDict

from verl_sis import verl_compat
from verl_sis.config import SisConfig
from verl_sis.core.acceptance import counter_uniforms
from verl_sis.verl_compat import SAMPLE_KEY

_RESPONSE_STREAM, _CONTEXT_STREAM = 1 << 61, 3 << 61
"""Bits of the seed that set these choices apart from the acceptance test's uniforms and from each other."""


@dataclass(frozen=True)
class Selection:
    """The responses of a rollout that are dumped: a function of the seed, the update counter and the rank's samples.

    Attributes:
        keys: ``[S]`` int64, sample keys of the responses.
        context_cut: Tokens of them whose uniform lies below this one are contexts.
        seed: Seed of the run.
        update: Update counter at the start of the rollout.
    """

    keys: torch.Tensor
    context_cut: float
    seed: int
    update: int

    @classmethod
    def of(cls, data: TensorDict, config: SisConfig, *, epochs: int, update: int) -> "Selection":
        """Choose the responses of lowest hash while their loss-bearing tokens, over all epochs, fit ``max_tokens``.

        Args:
            data: All samples of the rollout on this rank, with their keys.
            config: Settings of SIS.
            epochs: How often each sample is trained on.
            update: Update counter at the start of the rollout.
        """
        mask = verl_compat.padded(data, "response_mask").bool().cpu()
        sample_key = data[SAMPLE_KEY].cpu()
        # By key: samples of equal tokens cannot be told apart later, and come together.
        keys, key_of_row = sample_key.unique(return_inverse=True)
        rows = torch.zeros_like(keys).index_add_(0, key_of_row, mask.sum(dim=1)) * epochs
        drawn = counter_uniforms(keys, torch.zeros_like(keys), seed=config.seed ^ _RESPONSE_STREAM, update=update)
        order = drawn.argsort(stable=True)
        fits = (rows[order].cumsum(0) <= config.dump.max_tokens) & (rows[order] > 0)
        selection = cls(keys[order[fits]], 1.0, config.seed, update)
        _, candidates = selection.tokens(data, mask)
        share = config.dump.max_contexts // epochs
        if len(candidates) <= share:
            return selection
        return cls(selection.keys, float(candidates.sort().values[share]), config.seed, update)

    def tokens(self, data: TensorDict, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen tokens of some samples.

        Args:
            data: Samples with their keys.
            mask: ``[B, T]`` bool, tokens that bear loss.

        Returns:
            ``[B, T]`` bool, chosen; and ``[n]`` float32, the uniform of each chosen token, which decides on contexts.
        """
        sample_key = data[SAMPLE_KEY].to(mask.device)
        chosen = mask & torch.isin(sample_key, self.keys.to(mask.device))[:, None]
        row, position = chosen.nonzero(as_tuple=True)
        seed = self.seed ^ _CONTEXT_STREAM
        return chosen, counter_uniforms(sample_key[row], position, seed=seed, update=self.update)
