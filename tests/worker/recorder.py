"""Records what SIS decided for each sample, by looking at the micro-batches that the worker hands to the loss."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch


@dataclass
class Decisions:
    """Uniforms, acceptance probabilities and residual masses by (update, sample key), cut to the response."""

    uniforms: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    acceptance: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    residual_mass: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def merge(self, other: "Decisions") -> None:
        self.uniforms.update(other.uniforms)
        self.acceptance.update(other.acceptance)
        self.residual_mass.update(other.residual_mass)


def record(worker: Any) -> Decisions:
    """Record all further decisions of a worker."""
    decisions = Decisions()
    update_pass = worker._update_pass
    test = update_pass._test

    def recording_test(layout, top_k, normalized, model_output, data):
        micro_batch = test(layout, top_k, normalized, model_output, data)
        for row, (key, length) in enumerate(zip(micro_batch.sample_key.tolist(), layout.lengths, strict=True)):
            at = (update_pass.update, key)
            decisions.uniforms[at] = micro_batch.uniforms[row, :length].clone()
            decisions.acceptance[at] = torch.exp(micro_batch.acceptance_log_prob[row, :length])
            decisions.residual_mass[at] = micro_batch.residual_mass[row, :length].clone()
        return micro_batch

    update_pass._test = recording_test
    return decisions


def assert_same_decisions(got: Decisions, expected: Decisions, *, borderline: float = 1e-5) -> None:
    """Uniforms bit-identical; masks equal wherever the acceptance probability is not within float error of u."""
    assert got.uniforms.keys() == expected.uniforms.keys()
    for at, uniforms in expected.uniforms.items():
        assert torch.equal(got.uniforms[at], uniforms), at
        clear = (expected.acceptance[at] - uniforms).abs() >= borderline
        differs = (got.uniforms[at] < got.acceptance[at]) != (uniforms < expected.acceptance[at])
        assert not (differs & clear).any(), at


def assert_off_policy(decisions: Decisions) -> None:
    """Tokens are accepted with probabilities of neither 0 nor 1, without which equal decisions mean little."""
    probabilities = torch.cat(list(decisions.acceptance.values()))
    assert ((probabilities > 0.01) & (probabilities < 0.99)).sum() >= 5


def assert_same_metrics(got: list[dict[str, float]], expected: list[dict[str, float]], *, absolute: float) -> None:
    """Metrics of SIS and mismatch, step by step, are the same within float32 rounding.

    Args:
        got: Of one layout.
        expected: Of another.
        absolute: Distance that is no difference, where values are near 0.
    """
    for step, (got_step, expected_step) in enumerate(zip(got, expected, strict=True)):
        names = {name for name in expected_step if name.startswith(("sis/", "mismatch/"))}
        assert names == {name for name in got_step if name.startswith(("sis/", "mismatch/"))}
        for name in names:
            # fp32 forward passes of other shapes; one AdamW update amplifies that in the second step.
            tolerance = 1e-4 if step == 0 else 5e-3
            assert got_step[name] == pytest.approx(expected_step[name], rel=tolerance, abs=absolute), (step, name)
