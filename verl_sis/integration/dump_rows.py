"""What a dump keeps of one rollout: the tokens of the chosen responses, as each update of the rollout met them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl_sis import verl_compat
from verl_sis.config import SisConfig
from verl_sis.core import acceptance
from verl_sis.core.by_k import acceptance_by_k, grid_up_to, sampled_rank
from verl_sis.core.envelope import TopK
from verl_sis.core.linear_head import Logits, log_probs_of_rows, tokens_of
from verl_sis.core.log_probs import entropy
from verl_sis.integration.dump_selection import Selection
from verl_sis.integration.layout import ResponseLayout
from verl_sis.integration.policy_loss import MicroBatch
from verl_sis.verl_compat import SAMPLE_KEY


def turns(mask: torch.Tensor) -> torch.Tensor:
    """Turn that each token of a response was sampled in: the number of runs of loss-bearing tokens before its own.

    Args:
        mask: ``[B, T]`` bool, tokens that bear loss.

    Returns:
        ``[B, T]`` int64, from 0; undefined where the mask is False.
    """
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0))
    return (mask & ~before).cumsum(dim=1) - 1


@dataclass(frozen=True)
class _Seen:
    """What the live logits of a micro-batch gave, for its ``n`` chosen tokens, ``m`` of them contexts."""

    layout: ResponseLayout
    chosen: torch.Tensor
    """``[B, T]`` bool."""
    columns: dict[str, torch.Tensor]
    """``[n]`` or ``[n, C]`` by name."""
    contexts: dict[str, torch.Tensor]
    """``[m]`` or ``[m, K]`` by name; ``index`` is that among the n."""


class RolloutRows:
    """Collects the chosen tokens of one rollout, micro-batch by micro-batch; ``anchor``, then ``look`` and ``take``.

    Under sequence parallelism every rank must look, for their looks are added up; only the first keeps anything.
    """

    def __init__(self, selection: Selection, config: SisConfig, vocab_size: int, *, keeps: bool) -> None:
        """Start empty.

        Args:
            selection: The chosen responses.
            config: Settings of SIS.
            vocab_size: Of the model.
            keeps: Whether this rank keeps what it sees.
        """
        self.selection = selection
        self.ks = grid_up_to(config.top_k)
        self.columns: list[dict[str, np.ndarray]] = []
        self.contexts: list[dict[str, np.ndarray]] = []
        self.counts = np.zeros((vocab_size, 2), dtype=np.int64)
        """Rejected and accepted tokens of each id, of all responses."""
        self._config = config
        self._keeps = keeps
        self._anchors: dict[int, torch.Tensor] = {}
        self.samples = 0
        """Samples seen so far, in all micro-batches."""
        self._seen: _Seen | None = None

    def anchor(self, logits: Logits, data: TensorDict) -> None:
        """Keep the log-probs of the chosen tokens before the first update.

        Args:
            logits: ``[n, V]`` live, temperature-scaled logits of this rank's slice.
            data: The micro-batch, with sample keys.
        """
        layout = ResponseLayout.of(data, local_size=logits.shape[0])
        chosen, _ = self.selection.tokens(data, _mask(data))
        picked = layout.unpad(chosen).nonzero().squeeze(1)
        local = layout.local()[picked]
        mine = picked[local]
        parts = []
        for part, log_prob in self._log_probs(logits, layout, mine):
            parts.append(log_prob.gather(1, layout.token_ids[mine[part], None]))
        values = _of_all_ranks(parts, local).squeeze(1).cpu()
        lengths = chosen.sum(dim=1).tolist()
        for key, row in zip(data[SAMPLE_KEY].tolist(), values.split(lengths), strict=True):
            if len(row):
                self._anchors[key] = row

    def look(self, logits: Logits, layout: ResponseLayout, top_k: TopK, data: TensorDict) -> None:
        """Take from the live logits of an update what the chosen tokens need: acceptance at each K, and entropy.

        Acceptance is that of the paper, 0 outside of V_K, also in a run with ``outside_top_k=envelope``. The old side
        is the stored top-K, which shares its normaliser with verl's ``old_log_prob``: where that is bfloat16 (no
        flash-attention), its rounding is in the envelope, and cancels in the acceptance.

        Args:
            logits: ``[n, V]`` live, temperature-scaled logits of this rank's slice.
            layout: Of the micro-batch.
            top_k: Of the old policy at all response tokens.
            data: The micro-batch, with sample keys.
        """
        chosen, drawn = self.selection.tokens(data, _mask(data))
        picked = layout.unpad(chosen).nonzero().squeeze(1)
        context = drawn < self.selection.context_cut
        local = layout.local()[picked]
        mine = picked[local]
        parts, at_top_k = [], []
        for part, log_prob in self._log_probs(logits, layout, mine):
            at = mine[part]
            old, token = tokens_of(top_k, at), layout.token_ids[at]
            current, sampled = log_prob.gather(1, old.ids.long()), log_prob.gather(1, token[:, None])
            by_k = acceptance_by_k(self.ks, old, sampled_rank(old, token), current, sampled.squeeze(1))
            tests = (by_k.log_envelope, by_k.residual_mass, by_k.acceptance)
            parts.append(torch.cat([sampled, entropy(log_prob)[:, None], *tests], dim=1))
            at_top_k.append(current[context[local][part]])
        values = _of_all_ranks(parts, local)
        current = _of_all_ranks(at_top_k, local[context])
        old = tokens_of(top_k, picked)
        log_envelope, residual_mass, acceptance_probability = values[:, 2:].split(len(self.ks), dim=1)
        columns = {
            "token": layout.token_ids[picked],
            "log_prob": values[:, 0],
            "entropy": values[:, 1],
            "old_rank": sampled_rank(old, layout.token_ids[picked]),
            "update_log_envelope": log_envelope,
            "update_residual_mass": residual_mass,
            "update_acceptance": acceptance_probability,
        }
        contexts = {
            "index": context.nonzero().squeeze(1),
            "ids": old.ids[context],
            "old_log_prob": old.log_prob[context],
            "current_log_prob": current,
        }
        self._seen = _Seen(layout, chosen, columns, contexts)

    def take(self, micro_batch: MicroBatch, data: TensorDict, *, update: int) -> None:
        """Keep the chosen tokens of the micro-batch that was looked at, and count its accepted and rejected ids.

        Args:
            micro_batch: What the loss was computed from.
            data: The micro-batch, with sample keys.
            update: Update counter.
        """
        seen, self._seen = self._seen, None
        if not self._keeps:
            return
        assert seen is not None
        mask, chosen = _mask(data), seen.chosen
        accepted = acceptance.accept(micro_batch.acceptance_log_prob, micro_batch.uniforms)
        bears_loss = seen.layout.unpad(mask)
        of_id = seen.layout.token_ids[bears_loss], seen.layout.unpad(accepted)[bears_loss].long()
        np.add.at(self.counts, tuple(column.cpu().numpy() for column in of_id), 1)
        row, position = chosen.nonzero(as_tuple=True)
        sample_key: Any = data[SAMPLE_KEY]
        columns = {
            **seen.columns,
            "sequence": self.samples + row,
            "position": position,
            "turn": turns(mask)[chosen],
            "sample_key": sample_key[row],
            "age": torch.full_like(row, update - self.selection.update),
            "advantage": verl_compat.padded(data, "advantages")[chosen],
            "old_log_prob": verl_compat.padded(data, "old_log_probs")[chosen],
            "anchor_log_prob": torch.cat(
                [torch.zeros(0), *(self._anchors[key] for key in sample_key[chosen.any(dim=1)].tolist())]
            ),
            "accepted": accepted[chosen],
        }
        if micro_batch.rollout_log_prob is not None:
            columns["rollout_log_prob"] = micro_batch.rollout_log_prob[chosen]
        self.samples += len(chosen)
        index = seen.contexts["index"]
        contexts = {name: columns[name][index] for name in ("sequence", "position", "token", "age", "sample_key")}
        contexts |= {name: values for name, values in seen.contexts.items() if name != "index"}
        self.columns.append(_on_host(columns))
        self.contexts.append(_on_host(contexts))

    def _log_probs(self, logits: Logits, layout: ResponseLayout, mine: torch.Tensor) -> Any:
        rows = layout.positions[mine] - layout.local_start
        return log_probs_of_rows(logits, rows, chunk_tokens=self._config.chunk_tokens)


class AnchorPass:
    """Loss function of the pass in train mode before the first update of a dumped rollout."""

    def __init__(self, rows: RolloutRows) -> None:
        """Bind what collects."""
        self._rows = rows

    def __call__(
        self,
        *,
        data: TensorDict,
        student_logits: Logits | None = None,
        model_output: dict[str, torch.Tensor] | None = None,
        dp_group: Any = None,
    ) -> Any:
        """Answer one of the engine's two calls, as ``verl_sis.integration.passes.OldPass`` does."""
        if student_logits is None:
            return torch.tensor(1.0), {}
        self._rows.anchor(verl_compat.packed_rows(student_logits), data)
        return {}


def _mask(data: TensorDict) -> torch.Tensor:
    return verl_compat.padded(data, "response_mask").bool()


def _of_all_ranks(parts: list[torch.Tensor], local: torch.Tensor) -> torch.Tensor:
    """Values of all chosen tokens, out of those of this sequence-parallel rank's; each token is on one rank."""
    values = torch.cat(parts)
    spread = values.new_zeros((len(local), values.shape[1]))
    spread[local] = values
    return verl_compat.sum_over_sequence_parallel(spread) if len(local) else spread


def _on_host(columns: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    narrow = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
    return {
        name: values.detach().to(device="cpu", dtype=narrow.get(values.dtype, values.dtype)).numpy()
        for name, values in columns.items()
    }
