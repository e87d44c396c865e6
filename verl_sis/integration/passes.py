"""The two passes of an actor that SIS looks into, as loss functions for verl's engines.

verl's engines call the loss function they are given twice per micro-batch when the logits hook is on: first
``loss(student_logits=[1, n, V], data=...)`` on temperature-scaled logits, which returns per-token tensors that the
engine gathers over sequence parallelism, then ``loss(model_output=..., data=..., dp_group=...)``. One object serves
both calls, so what the first saw is at hand in the second. With fused kernels, which never materialise the logits, the
first call comes from inside the model's forward and hands over a ``LinearHead`` (``verl_sis.verl_compat.fused``). What
rows and columns the logits hold is the engine's matter (see ``verl_sis.integration.live_logits``); Megatron's says
``data_format`` too.
"""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from verl_sis import verl_compat
from verl_sis.config import SisConfig
from verl_sis.core import acceptance, envelope
from verl_sis.core.linear_head import LinearHead, Logits, OldRows, current_rows, old_rows, tokens_of
from verl_sis.errors import SisStateError
from verl_sis.integration.base_loss import PolicyLoss
from verl_sis.integration.dump_rows import RolloutRows
from verl_sis.integration.layout import ResponseLayout
from verl_sis.integration.live_logits import LiveLogits, Look, look_at_fsdp
from verl_sis.integration.policy_loss import CURRENT, MicroBatch
from verl_sis.integration.store import TopKStore
from verl_sis.verl_compat import SAMPLE_KEY

STATISTICS = "sis_statistics"
"""Key under which a micro-batch's PooledStatistics travel through verl's metric exchange to the worker."""

_LOG_ENVELOPE, _LOG_MASS, _SAMPLED_LOGIT, _LOG_NORMALIZER = (
    "sis_log_envelope",
    "sis_log_mass",
    "sis_sampled_logit",
    "sis_log_normalizer",
)

FUSED_TOLERANCE = 0.1
"""Mean distance in nats of a fused kernel's log-probs from those of the hidden states and the LM head, above which the
two are not of one policy. bfloat16 logits of 16 are off by up to 0.06, and kernels round in different places."""

_NORMALIZER_STREAM = 1 << 62
"""Bit of the seed that sets the choice of normalised tokens apart from the acceptance test's uniforms."""


class OldPass:
    """Loss function of ``compute_log_prob``: takes the top-K of the old policy from the live logits and stores it."""

    def __init__(self, config: SisConfig, store: TopKStore, look: Look = look_at_fsdp) -> None:
        """Bind the settings, the store to fill, and how the engine's logits are read."""
        self._config = config
        self._store = store
        self._live = look
        self._pending: tuple[ResponseLayout, OldRows, bool] | None = None

    def __call__(
        self,
        *,
        data: TensorDict,
        student_logits: Logits | None = None,
        data_format: str | None = None,
        model_output: dict[str, torch.Tensor] | None = None,
        dp_group: Any = None,
    ) -> Any:
        """Answer one of the engine's two calls (see the module's docstring).

        Returns:
            No per-token outputs for the first call; for the second the loss 1 and no metrics, which is what verl's
            engine puts there when it is given no loss function.
        """
        if student_logits is not None:
            self._pending = self._look(self._live(student_logits, data, data_format))
            return {}
        if self._pending is None or model_output is None:
            raise SisStateError("the engine did not call the logits hook in compute_log_prob, so there is no top-K")
        layout, old, counts_padding = self._pending
        self._pending = None
        own = None if old.log_normalizer is None else old.sampled_logit - old.log_normalizer
        if own is not None and counts_padding:
            sampled_log_prob = own
        else:
            sampled_log_prob = _packed(model_output["log_probs"])[layout.positions]
            if own is not None:
                _check_same_policy(own, sampled_log_prob)
        top_k = envelope.top_k_from_logits(old.values, old.ids, old.sampled_logit, layout.token_ids, sampled_log_prob)
        self._store.put(data[SAMPLE_KEY].tolist(), layout.lengths, top_k)
        return torch.tensor(1.0, device=sampled_log_prob.device), {}

    @torch.no_grad()
    def _look(self, live: LiveLogits) -> tuple[ResponseLayout, OldRows, bool]:
        layout = live.layout
        # With fused kernels for a comparison with theirs: the first micro-batch of each old pass is enough for that.
        compare = isinstance(live.values, LinearHead) and not len(self._store)
        old = old_rows(
            live.values,
            layout.local_ranges(),
            layout.token_ids[layout.local()],
            self._config.top_k,
            normalize=live.counts_padding or compare,
            chunk_tokens=self._config.chunk_tokens,
            vocabulary=live.vocabulary,
        )
        collected = OldRows(
            values=layout.collect(old.values),
            ids=layout.collect(old.ids),
            sampled_logit=layout.collect(old.sampled_logit),
            log_normalizer=None if old.log_normalizer is None else layout.collect(old.log_normalizer),
        )
        return layout, collected, live.counts_padding


class UpdatePass:
    """Loss function of ``update_actor``: envelope and acceptance from the live logits, then verl's own loss."""

    def __init__(
        self,
        config: SisConfig,
        store: TopKStore,
        base_loss: PolicyLoss,
        verl_loss: Callable[..., Any],
        look: Look = look_at_fsdp,
    ) -> None:
        """Bind the settings, the store to read, the base loss, verl's loss, and how the engine's logits are read."""
        self._config = config
        self._store = store
        self._live = look
        self._base_loss = base_loss
        self._verl_loss = verl_loss
        self._pending: tuple[ResponseLayout, envelope.TopK, torch.Tensor] | None = None
        self.update = 0
        self.rows: RolloutRows | None = None
        """Collects the tokens of a rollout that is dumped, while it is trained on."""

    def __call__(
        self,
        *,
        data: TensorDict,
        student_logits: Logits | None = None,
        data_format: str | None = None,
        model_output: dict[str, torch.Tensor] | None = None,
        dp_group: Any = None,
    ) -> Any:
        """Answer one of the engine's two calls (see the module's docstring).

        Returns:
            Per-token ``[1, n]`` tensors for the first call; loss and metrics for the second, with the micro-batch's
            statistics among the metrics.
        """
        if student_logits is not None:
            return self._look(self._live(student_logits, data, data_format), data)
        if self._pending is None or model_output is None:
            raise SisStateError("the engine did not call the logits hook in update_actor, so no token could be tested")
        layout, top_k, normalized = self._pending
        self._pending = None
        micro_batch = self._test(layout, top_k, normalized, model_output, data)
        token = CURRENT.set(micro_batch)
        try:
            loss, metrics = self._verl_loss(model_output=model_output, data=data, dp_group=dp_group)
        finally:
            CURRENT.reset(token)
        if self.rows is not None:
            self.rows.take(micro_batch, data, update=self.update)
        return loss, {**metrics, STATISTICS: micro_batch.statistics}

    @torch.no_grad()
    def _look(self, live: LiveLogits, data: TensorDict) -> dict[str, torch.Tensor]:
        layout, logits = live.layout, live.values
        top_k = self._store.get(data[SAMPLE_KEY].tolist(), layout.lengths)
        own_normalizer, normalized = self._normalized(live, data)
        self._pending = layout, top_k, normalized
        if self.rows is not None:
            self.rows.look(logits, layout, top_k, data)
        local = layout.local()
        terms, log_normalizer = current_rows(
            logits,
            layout.local_ranges(),
            tokens_of(top_k, local),
            layout.token_ids[local],
            normalized=normalized[local] if own_normalizer else None,
            chunk_tokens=self._config.chunk_tokens,
            vocabulary=live.vocabulary,
        )
        outputs = {
            _LOG_ENVELOPE: terms.log_envelope,
            _LOG_MASS: terms.log_mass,
            _SAMPLED_LOGIT: terms.sampled_logit,
        }
        if log_normalizer is not None:
            outputs[_LOG_NORMALIZER] = log_normalizer
        return {name: live.spread(values) for name, values in outputs.items()}

    def _normalized(self, live: LiveLogits, data: TensorDict) -> tuple[bool, torch.Tensor]:
        """Whether SIS takes a log-sum-exp of its own, and bool ``[R]``: the tokens whose normaliser is known."""
        # Where verl's log-probs give the normaliser, it costs nothing; beside the matrix product of a head, little.
        if live.exact_log_probs or isinstance(live.values, LinearHead):
            return not live.exact_log_probs, torch.ones_like(live.layout.positions, dtype=torch.bool)
        return True, self._choose(live.layout, data)

    def _choose(self, layout: ResponseLayout, data: TensorDict) -> torch.Tensor:
        """Bool ``[R]``: the tokens whose normaliser is taken, the same on any layout of ranks and batches."""
        key = data[SAMPLE_KEY]
        lengths = torch.tensor(layout.lengths, device=key.device)
        position = torch.cat([torch.arange(length, device=key.device) for length in layout.lengths])
        seed = self._config.seed ^ _NORMALIZER_STREAM
        drawn = acceptance.counter_uniforms(key.repeat_interleave(lengths), position, seed=seed, update=self.update)
        return drawn < self._config.normalizer_share

    @torch.no_grad()
    def _test(
        self,
        layout: ResponseLayout,
        top_k: envelope.TopK,
        normalized: torch.Tensor,
        model_output: dict[str, torch.Tensor],
        data: TensorDict,
    ) -> MicroBatch:
        at = {name: _packed(model_output.pop(name))[layout.positions] for name in _outputs_in(model_output)}
        terms = envelope.EnvelopeTerms(at[_LOG_ENVELOPE], at[_LOG_MASS], at[_SAMPLED_LOGIT])
        normalizer = at.get(_LOG_NORMALIZER)
        if normalizer is None:
            normalizer = terms.sampled_logit - _packed(model_output["log_probs"])[layout.positions].float()
        current = envelope.normalize_envelope(terms, normalizer)
        # Both carry the same unknown normaliser of the current policy, which cancels.
        acceptance_log_prob = acceptance.acceptance_log_prob(
            terms.sampled_logit - top_k.sampled_log_prob,
            terms.log_envelope,
            top_k.contains_sampled,
            outside_top_k=self._config.outside_top_k,
        )
        width = verl_compat.response_width(data)
        sample_key = data[SAMPLE_KEY]
        position = torch.arange(width, device=sample_key.device)
        return MicroBatch(
            base_loss=self._base_loss,
            estimator=self._config.estimator,
            acceptance_log_prob=layout.pad(acceptance_log_prob, width),
            uniforms=acceptance.counter_uniforms(
                sample_key[:, None], position[None, :], seed=self._config.seed, update=self.update
            ),
            contains_sampled=layout.pad(top_k.contains_sampled, width),
            log_expected=layout.pad(terms.log_expected_acceptance, width),
            normalized=layout.pad(normalized, width),
            log_envelope=layout.pad(current.log_envelope, width),
            residual_mass=layout.pad(current.residual_mass, width),
            stored_log_prob=layout.pad(top_k.sampled_log_prob, width),
            sample_key=sample_key,
            rollout_log_prob=verl_compat.padded(data, "rollout_log_probs") if "rollout_log_probs" in data else None,
        )


def _check_same_policy(own: torch.Tensor, of_kernel: torch.Tensor) -> None:
    """Check a fused kernel's log-probs ``[R]`` against those of the hidden states and the LM head.

    Raises:
        SisStateError: If they are of two policies.
    """
    finite = own.isfinite()
    gap = float((own - of_kernel.float())[finite].abs().sum() / finite.sum().clamp(min=1))
    if not gap <= FUSED_TOLERANCE:
        raise SisStateError(
            f"the fused kernel's log-probs differ from those of the hidden states and lm_head by {gap:.3g} nats a "
            f"token on average (tolerance {FUSED_TOLERANCE}): acceptance would be tested against another policy. Type "
            "actor_rollout_ref.model.fused_kernel_options.impl_backend=torch, or "
            "actor_rollout_ref.model.use_fused_kernels=False"
        )


def _packed(nested: Any) -> torch.Tensor:
    """Packed values ``[N]`` of a nested per-token output ``[B, j]``."""
    return nested.values()


def _outputs_in(model_output: dict[str, torch.Tensor]) -> list[str]:
    names = (_LOG_ENVELOPE, _LOG_MASS, _SAMPLED_LOGIT, _LOG_NORMALIZER)
    return [name for name in names if name in model_output]
