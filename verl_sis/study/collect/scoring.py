"""What one forward pass of the trainer says of the responses, read from the live logits through verl's own hook."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl_sis import verl_compat
from verl_sis.core import envelope
from verl_sis.core.log_probs import entropy, log_probs_in_chunks
from verl_sis.errors import SisStateError
from verl_sis.integration.layout import ResponseLayout

NUMBER = "study_number"
"""Column ``[B]`` int64 by which samples are known again after verl has reordered them into micro-batches."""

CHUNK_TOKENS = 256
"""Tokens whose logits are in float32 at a time."""


@dataclass(frozen=True)
class Scores:
    """One response under one pass of the trainer; float32 log-probs of one float32 log-sum-exp, in nats.

    Attributes:
        log_prob: ``[R]`` of the sampled tokens.
        verl_log_prob: ``[R]`` the same as verl's engine computes it.
        entropy: ``[R]``.
        queried: ``[R, Q]`` of the ids that were asked for; None if none were.
        top_ids: int32 ``[R, K]``, the pass's own top-K by decreasing probability; None if not wanted.
        top_log_prob: ``[R, K]`` of these.
    """

    log_prob: np.ndarray
    verl_log_prob: np.ndarray
    entropy: np.ndarray
    queried: np.ndarray | None
    top_ids: np.ndarray | None
    top_log_prob: np.ndarray | None


class ScoringPass:
    """Loss function of a forward-only pass that keeps ``Scores``; verl's engine calls it twice per micro-batch.

    First with the temperature-scaled logits, then with its own outputs (see ``verl_sis.integration.passes``).
    """

    def __init__(self, queries: dict[int, np.ndarray] | None, own_top_k: int) -> None:
        """Prepare for a batch.

        Args:
            queries: int ``[R, Q]`` ids to score at each token, by number of the sample; None for none.
            own_top_k: Entries of the pass's own top-K to keep; 0 for none.
        """
        self._queries = queries
        self._own_top_k = own_top_k
        self._pending: tuple[ResponseLayout, list[dict[str, np.ndarray | None]]] | None = None
        self.found: dict[int, Scores] = {}

    def __call__(
        self,
        *,
        data: TensorDict,
        student_logits: torch.Tensor | None = None,
        model_output: dict[str, Any] | None = None,
        dp_group: Any = None,
    ) -> Any:
        """Answer one of the engine's two calls.

        Returns:
            No per-token outputs for the first, the loss 1 and no metrics for the second.
        """
        if student_logits is not None:
            self._look(student_logits.squeeze(0), data)
            return {}
        if self._pending is None or model_output is None:
            raise SisStateError("verl's engine did not call the logits hook, so there is nothing to score")
        layout, parts = self._pending
        self._pending = None
        log_probs = model_output["log_probs"].values()[layout.positions].float().cpu().split(layout.lengths)
        for number, part, log_prob in zip(data[NUMBER].tolist(), parts, log_probs, strict=True):
            self.found[number] = Scores(verl_log_prob=log_prob.numpy(), **part)  # type: ignore[arg-type]
        return torch.tensor(1.0, device=layout.positions.device), {}

    @torch.no_grad()
    def _look(self, logits: torch.Tensor, data: TensorDict) -> None:
        layout = ResponseLayout.of(data, local_size=logits.shape[0])
        tokens = layout.token_ids.split(layout.lengths)
        positions = layout.positions.split(layout.lengths)
        parts = []
        for number, rows, ids in zip(data[NUMBER].tolist(), positions, tokens, strict=True):
            queries = None if self._queries is None else torch.as_tensor(self._queries[number], device=logits.device)
            chunks = [
                self._chunk(log_prob, ids[part], None if queries is None else queries[part])
                for part, log_prob in log_probs_in_chunks(logits, rows, chunk_tokens=CHUNK_TOKENS)
            ]
            parts.append({name: _joined([chunk[name] for chunk in chunks]) for name in chunks[0]})
        self._pending = layout, parts

    def _chunk(
        self, log_prob: torch.Tensor, ids: torch.Tensor, queries: torch.Tensor | None
    ) -> dict[str, torch.Tensor | None]:
        values = top_ids = None
        if self._own_top_k:
            values, top_ids = envelope.top_k_logits(log_prob, self._own_top_k, chunk_tokens=CHUNK_TOKENS)
        return {
            "log_prob": log_prob.gather(1, ids.long()[:, None]).squeeze(1),
            "entropy": entropy(log_prob),
            "queried": None if queries is None else log_prob.gather(1, queries.long()),
            "top_ids": top_ids,
            "top_log_prob": values,
        }


def _joined(chunks: list[torch.Tensor | None]) -> np.ndarray | None:
    tensors = [chunk for chunk in chunks if chunk is not None]
    return torch.cat(tensors).cpu().numpy() if tensors else None


def batch_of(samples: list[Any], numbers: list[int]) -> dict[str, torch.Tensor]:
    """Columns of a batch as verl's trainer hands it to ``compute_log_prob``.

    Args:
        samples: Responses with ``prompt_ids``, ``ids`` and ``routes`` (all with, or none).
        numbers: A number for each.

    Returns:
        By verl's names, nested over tokens.
    """
    prompts = [torch.as_tensor(sample.prompt_ids).long() for sample in samples]
    responses = [torch.as_tensor(sample.ids).long() for sample in samples]
    sequences = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    masks = [torch.ones_like(response) for response in responses]
    columns = {
        "prompts": _nested(prompts),
        "responses": _nested(responses),
        "input_ids": _nested(sequences),
        "position_ids": _nested([torch.arange(len(sequence)) for sequence in sequences]),
        "response_mask": _nested(masks),
        "loss_mask": _nested(masks),
        NUMBER: torch.tensor(numbers),
    }
    if samples[0].routes is not None:
        # One row per token: the last token is never fed to the engine, so verl carries zeros for it.
        rows = [torch.as_tensor(sample.routes) for sample in samples]
        columns["routed_experts"] = _nested([torch.cat([row, torch.zeros_like(row[:1])]) for row in rows])
    return columns


def _nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def hooked(columns: dict[str, torch.Tensor], **settings: Any) -> TensorDict:
    """A batch for a forward pass under which verl's engine calls the logits hook.

    Args:
        columns: As ``batch_of`` returns them.
        settings: Further entries that are no tensors.
    """
    from verl.utils import tensordict_utils as tu

    sequences: Any = columns["input_ids"]
    entries: dict[str, Any] = {
        "calculate_entropy": False,
        "compute_loss": True,
        "global_token_num": sequences.offsets().diff().tolist(),
        verl_compat.LOGITS_HOOK_FLAG: True,
        **settings,
    }
    return tu.get_tensordict(dict(columns), non_tensor_dict=entries)
