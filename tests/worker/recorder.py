"""Records what SIS decided for each sample, by looking at the micro-batches that the worker hands to the loss."""

from dataclasses import dataclass, field
from typing import Any

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
