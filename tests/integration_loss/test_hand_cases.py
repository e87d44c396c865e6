"""Three tokens of one response under SIS with vanilla, GSPO (Eq. 40) and CISPO: value and gradient by hand.

The response: w = 1.1, 1.5, 0.8 (log pi = -1, -2, -0.5), A = 1 or -1, clip range 0.2, mean over the three tokens.
"""

import math

import pytest
import torch

from ..reference import sis_by_hand as reference
from .calls import Batch, Outcome, actor_config, call_under_sis, decided, micro_batch

W, LOG_PI = (1.1, 1.5, 0.8), (-1.0, -2.0, -0.5)
LOG_W = [math.log(w) for w in W]


def outcome(base: str, z: tuple[bool, ...], advantage: float, **settings) -> Outcome:
    log_prob = torch.tensor([LOG_PI])
    batch = Batch(
        log_prob=log_prob,
        old_log_prob=log_prob - torch.tensor([LOG_W]),
        advantages=torch.full((1, 3), advantage),
        mask=torch.ones(1, 3, dtype=torch.bool),
        config=actor_config(clip_ratio_low=0.2, clip_ratio_high=0.2, **settings),
    )
    return call_under_sis(batch, micro_batch(base, decided(torch.tensor([z]))))


def check(found: Outcome, value: float, gradient: list[float]) -> None:
    assert float(found.value) == pytest.approx(value, rel=1e-5)
    assert found.gradient[0].tolist() == pytest.approx(gradient, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("z", "advantage", "losses", "slopes"),
    [
        # A = 1. Rejected: -1.1; -1.5 clipped to -1.2, no gradient; -0.8. Accepted: -1, gradient -A.
        ((False, False, False), 1.0, (-1.1, -1.2, -0.8), (-1.1, 0.0, -0.8)),
        ((False, True, False), 1.0, (-1.1, -1.0, -0.8), (-1.1, -1.0, -0.8)),
        ((True, False, True), 1.0, (-1.0, -1.2, -1.0), (-1.0, 0.0, -1.0)),
        ((True, True, True), 1.0, (-1.0, -1.0, -1.0), (-1.0, -1.0, -1.0)),
        # A = -1. 0.8 lies at the edge of the range: max(0.8, clip) = 0.8 and verl's max splits its gradient.
        ((False, False, True), -1.0, (1.1, 1.5, 1.0), (1.1, 1.5, 1.0)),
        ((True, False, True), -1.0, (1.0, 1.5, 1.0), (1.0, 1.5, 1.0)),
    ],
)
def test_vanilla(z, advantage, losses, slopes):
    check(outcome("vanilla", z, advantage), sum(losses) / 3, [slope / 3 for slope in slopes])


@pytest.mark.parametrize(
    ("z", "clipped"),
    [
        ((False, False, False), False),  # s = (1.1 * 1.5 * 0.8)^(1/3) = 1.32^(1/3) = 1.0970
        ((False, True, False), False),  # s = (1.1 * 0.8)^(1/3) = 0.9583: the accepted token adds log 1 = 0
        ((True, False, True), False),  # s = 1.5^(1/3) = 1.1447
        ((True, True, True), False),  # s = 1
    ],
)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gspo_follows_equation_40(z, clipped, advantage):
    # loss = -A s for each token, gradient -A s / 3: accepted tokens count in |y| and share the response's ratio.
    product = math.prod(w for w, accepted in zip(W, z, strict=True) if not accepted)
    s = product ** (1 / 3)
    assert (abs(s - 1) > 0.2) == clipped
    found = outcome("gspo", z, advantage, loss_agg_mode="seq-mean-token-mean")
    check(found, -advantage * s, [-advantage * s / 3] * 3)


def test_gspo_clips_the_ratio_of_the_response():
    # Only the second token is rejected: s = 1.5^(1/3) = 1.1447, above 1 + 0.1: -1.1 without gradient.
    log_prob = torch.tensor([LOG_PI])
    batch = Batch(
        log_prob,
        log_prob - torch.tensor([LOG_W]),
        torch.ones(1, 3),
        torch.ones(1, 3, dtype=torch.bool),
        config=actor_config(clip_ratio_low=0.1, clip_ratio_high=0.1, loss_agg_mode="seq-mean-token-mean"),
    )
    z = torch.tensor([[True, False, True]])
    check(call_under_sis(batch, micro_batch("gspo", decided(z))), -1.1, [0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("z", "advantage", "weights"),
    [
        # -sg(clip(w)) A log pi: weights 1.1, 1.2 (clipped, gradient stays), 0.8; accepted 1.
        ((False, False, False), 1.0, (1.1, 1.2, 0.8)),
        ((False, True, False), 1.0, (1.1, 1.0, 0.8)),
        ((True, False, True), -1.0, (1.0, 1.2, 1.0)),
        ((True, True, True), -1.0, (1.0, 1.0, 1.0)),
    ],
)
def test_cispo(z, advantage, weights):
    # Value for A = 1, none accepted: (1.1 * 1 + 1.2 * 2 + 0.8 * 0.5) / 3 = 3.9 / 3.
    value = -advantage * sum(weight * log_pi for weight, log_pi in zip(weights, LOG_PI, strict=True)) / 3
    check(outcome("cispo", z, advantage), value, [-advantage * weight / 3 for weight in weights])


MASKS = [tuple(bool(bits >> t & 1) for t in range(3)) for bits in range(8)]


@pytest.mark.parametrize("advantage", [0.7, -1.3])
@pytest.mark.parametrize("z", MASKS)
def test_all_masks_equal_the_references(z, advantage):
    # Clip range 0.25 / 0.3, so that no ratio sits on an edge.
    settings = {"clip_ratio_low": 0.25, "clip_ratio_high": 0.3}
    log_ratios = [0.0 if accepted else x for x, accepted in zip(LOG_W, z, strict=True)]
    vanilla = [reference.vanilla_token(x, advantage, 0.25, 0.3, 3.0) for x in log_ratios]
    cispo = [
        reference.cispo_token(x, log_pi, advantage, 0.25, 0.3) for x, log_pi in zip(log_ratios, LOG_PI, strict=True)
    ]
    gspo = [reference.gspo_token(reference.gspo_exponent(LOG_W, z), advantage, 0.25, 0.3)] * 3
    for base, tokens in (("vanilla", vanilla), ("cispo", cispo), ("gspo", gspo)):
        log_prob = torch.tensor([LOG_PI])
        batch = Batch(
            log_prob,
            log_prob - torch.tensor([LOG_W]),
            torch.full((1, 3), advantage),
            torch.ones(1, 3, dtype=torch.bool),
            config=actor_config(**settings),
        )
        found = call_under_sis(batch, micro_batch(base, decided(torch.tensor([z]))))
        check(found, sum(loss for loss, _ in tokens) / 3, [slope / 3 for _, slope in tokens])


def test_acceptance_decides_by_the_micro_batchs_own_uniforms():
    # a = 1/2 for all; u = 0.4 accepts, 0.6 rejects: z = (1, 0, 1) as above.
    log_prob = torch.tensor([LOG_PI])
    batch = Batch(log_prob, log_prob - torch.tensor([LOG_W]), torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool))
    half = torch.full((1, 3), math.log(0.5))
    current = micro_batch("vanilla", half, uniforms=torch.tensor([[0.4, 0.6, 0.4]]))
    check(call_under_sis(batch, current), -3.2 / 3, [-1 / 3, 0.0, -1 / 3])
    assert current.statistics.sums["accepted"] == 2.0
