"""The work that ``bench_sis.py`` measures: verl's own, what SIS adds to it, and the same written down directly.

The measured objects are the ones that verl's engines call (``verl_sis.integration.passes``), on a micro-batch of which
every row but one per sequence predicts a response token: prompts, which SIS skips, only lower its share.
"""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import logprobs_from_logits

from verl_sis.config import SisConfig
from verl_sis.core import envelope
from verl_sis.core.linear_head import LinearHead, Logits
from verl_sis.integration.passes import OldPass, UpdatePass
from verl_sis.integration.policy_loss import sis_policy_loss
from verl_sis.integration.store import TopKStore
from verl_sis.run_facts import ACTIVATION_MODULE, SisRunFacts
from verl_sis.verl_compat import SAMPLE_KEY, sample_keys


@dataclass(frozen=True)
class Shape:
    """What is measured: packed ``tokens`` of ``vocab`` logits, cut into ``sequences``; SIS works on ``chunk`` rows."""

    tokens: int
    vocab: int
    sequences: int
    chunk: int
    device: str


class Tokens:
    """A micro-batch as verl's engine has it when it calls SIS."""

    def __init__(self, shape: Shape, labels: torch.Tensor) -> None:
        """Lay out the tokens: row p predicts token p + 1, so the labels are verl's rolled input."""
        self.shape = shape
        self.labels = labels
        rows = list(labels.roll(1).tensor_split(shape.sequences))
        columns = {"prompts": [row[:1] for row in rows], "responses": [row[1:] for row in rows], "input_ids": rows}
        columns["response_mask"] = [torch.ones_like(row) for row in columns["responses"]]
        columns["rollout_log_probs"] = [torch.full(row.shape, -2.0, device=row.device) for row in columns["responses"]]
        self.data = tu.get_tensordict({name: _nested(column) for name, column in columns.items()})
        self.data[SAMPLE_KEY] = sample_keys(self.data).to(shape.device)
        self.offsets = self.data["input_ids"].offsets()

    def packed(self, values: torch.Tensor) -> torch.Tensor:
        """Per-token values ``[tokens]`` as the engine hands them to a loss function."""
        return torch.nested.nested_tensor_from_jagged(values, self.offsets)

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """Per-token values ``[tokens]`` as verl's loss sees the responses, ``[B, T]``."""
        return torch.nested.to_padded_tensor(_nested([row[:-1] for row in self.packed(values).unbind()]), 0.0)


class MicroBatch(Tokens):
    """Logits before and after some drift of the policy."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        """Draw logits, tokens from them, and slightly different logits of the current policy."""
        generator = torch.Generator(shape.device).manual_seed(0)
        size = {"size": (shape.tokens, shape.vocab), "generator": generator, "device": shape.device}
        logits = 3.0 * torch.randn(**size)
        super().__init__(shape, torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1))
        self.old_logits = logits.to(dtype)
        self.logits = logits.add_(torch.randn(**size), alpha=0.05).to(dtype).requires_grad_()
        self.old_log_probs, self.log_probs = (
            self.verl_forward(),
            logprobs_from_logits(self.logits, self.labels).detach(),
        )

    @torch.no_grad()
    def verl_forward(self) -> torch.Tensor:
        """Verl's work in the old pass: log-probs of the sampled tokens."""
        return logprobs_from_logits(self.old_logits, self.labels)

    def verl_forward_backward(self) -> torch.Tensor:
        """Verl's work in the update: the same with gradient, and its backward to the logits."""
        log_probs = logprobs_from_logits(self.logits, self.labels, inplace_backward=False)
        return torch.autograd.grad(log_probs, self.logits, torch.ones_like(log_probs))[0]


def _nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _as_the_engine_has_it(logits: Logits) -> Logits:
    return logits if isinstance(logits, LinearHead) else logits.unsqueeze(0)


class SisJobs:
    """What SIS adds to each pass, through the objects that verl's engine calls."""

    def __init__(self, batch: Any, k: int) -> None:
        """Bind the passes and run the old one, whose top-K the update needs.

        Args:
            batch: ``Tokens`` with ``old_logits`` and ``logits``, tensors or heads, and the log-probs of both.
            k: Size of V_K.
        """
        facts = SisRunFacts(external_lib=ACTIVATION_MODULE)
        config = SisConfig(top_k=k, chunk_tokens=batch.shape.chunk, run=facts)
        store = TopKStore()
        self._batch = batch
        self._old = OldPass(config, store)
        self._update = UpdatePass(config, store, self._no_base_loss, self._loss)
        self._padded = {
            "old_log_prob": batch.padded(batch.old_log_probs),
            "log_prob": batch.padded(batch.log_probs),
            "advantages": torch.ones_like(batch.padded(batch.log_probs)),
            "response_mask": batch.padded(torch.ones_like(batch.log_probs)).bool(),
        }
        self.old_pass()

    def _loss(self, **_: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return sis_policy_loss(**self._padded)

    @staticmethod
    def _no_base_loss(log_prob: torch.Tensor, **_: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return log_prob, {}

    @torch.no_grad()
    def old_pass(self) -> Any:
        """Capture: top-K, the sampled token's logit, both normalised by verl's log-prob, stored."""
        return self.old_pass_on(self._batch.old_logits, self._batch.old_log_probs)

    @torch.no_grad()
    def old_pass_on(self, logits: Logits, log_probs: torch.Tensor) -> Any:
        """The same on given logits and log-probs of the old policy."""
        batch = self._batch
        self._old(student_logits=_as_the_engine_has_it(logits), data=batch.data)
        return self._old(model_output={"log_probs": batch.packed(log_probs)}, data=batch.data)

    def update_pass(self) -> Any:
        """Envelope, acceptance, transformed old log-probs, and the statistics of the micro-batch."""
        return self.update_pass_on(self._batch.logits, self._batch.log_probs)

    def update_pass_on(self, logits: Logits, log_probs: torch.Tensor) -> Any:
        """The same on given logits and log-probs of the current policy."""
        batch = self._batch
        outputs = self._update(student_logits=_as_the_engine_has_it(logits), data=batch.data)
        model_output = {name: batch.packed(values.squeeze(0)) for name, values in outputs.items()}
        model_output["log_probs"] = batch.packed(log_probs)
        return self._update(model_output=model_output, data=batch.data)

    def update_pass_given_float32(self) -> Any:
        """The update where verl's log-probs are float32-accurate, as they are under flash-attention."""
        with mock.patch("verl_sis.verl_compat.log_probs_keep_float32", lambda *_: True):
            return self.update_pass()

    @torch.no_grad()
    def log_normalizer(self) -> torch.Tensor:
        """The part of the update that verl's bfloat16 log-probs cost: a float32 log-sum-exp over the vocabulary."""
        return envelope.log_normalizer(self._batch.logits, chunk_tokens=self._batch.shape.chunk)


class StraightforwardJobs:
    """The same quantities written down directly: a softmax of everything, with whatever it keeps."""

    def __init__(self, batch: MicroBatch, k: int) -> None:
        """Run the old pass, whose top-K the update needs."""
        self._batch, self._k = batch, k
        self._top = self.old_pass()

    @torch.no_grad()
    def old_pass(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-softmax over the vocabulary, top-K, gather of the sampled token."""
        log_probs = torch.log_softmax(self._batch.old_logits.float(), dim=-1)
        top = log_probs.topk(self._k, dim=-1)
        log_probs.gather(1, self._batch.labels[:, None])
        return top.values, top.indices

    def update_pass(self) -> torch.Tensor:
        """Log-softmax with gradient, gather at the top-K, envelope, residual mass, acceptance."""
        old, ids = self._top
        log_probs = torch.log_softmax(self._batch.logits.float(), dim=-1)
        current = log_probs.gather(1, ids)
        residual = 1 - torch.logsumexp(current, dim=-1).exp()
        return residual, torch.rand_like(residual) < (current[:, 0] - (current - old).amax(dim=-1)).exp()
