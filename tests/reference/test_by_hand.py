"""The references against numbers small enough to check with a pencil: they judge everything else."""

import math

import pytest

from . import sis_by_hand as reference
from . import uniforms_by_hand

# pi_old = (1/2, 1/4, 1/8, 1/8), pi = (1/4, 1/4, 1/4, 1/4): w = (1/2, 1, 2, 2).
PI_OLD = (0.5, 0.25, 0.125, 0.125)
PI = (0.25, 0.25, 0.25, 0.25)


def test_envelopes_of_four_tokens():
    assert reference.exact_envelope(PI, PI_OLD) == 2.0
    assert reference.top_k_ids(PI_OLD, 2) == [0, 1]
    assert reference.top_k_envelope(PI, PI_OLD, [0, 1]) == 1.0
    assert reference.residual_mass(PI, [0, 1]) == 0.5


def test_acceptance_of_four_tokens():
    # K = 2: a = (1/2, 1, 0, 0); E[z] = 1/2 * 1/2 + 1/4 * 1 = 1/2 = (1 - xi) / M^.
    assert [reference.acceptance_probability(y, PI, PI_OLD, [0, 1]) for y in range(4)] == [0.5, 1.0, 0.0, 0.0]
    assert reference.mean_acceptance(PI, PI_OLD, [0, 1]) == 0.5
    # pi_old a = (1/4, 1/4): pi restricted to V_2 is (1/2, 1/2).
    assert reference.accepted_token_law(PI, PI_OLD, [0, 1]) == [0.5, 0.5, 0.0, 0.0]


def test_gspo_exponent_counts_accepted_tokens_in_the_length():
    # log w = (0.3, -0.6, 0.9), the last accepted: (0.3 - 0.6) / 3 = -0.1, not / 2.
    assert reference.gspo_exponent([0.3, -0.6, 0.9], [False, False, True]) == pytest.approx(-0.1)
    assert reference.theorem_1_distance([0.3, -0.6, 0.9]) == pytest.approx(1.8)
    assert reference.sis_distance([0.3, -0.6, 0.9], [False, False, True]) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("w", "advantage", "loss", "slope"),
    [
        (1.1, 1.0, -1.1, -1.1),  # inside the range
        (1.5, 1.0, -1.2, 0.0),  # clipped from above
        (0.5, 1.0, -0.5, -0.5),  # A > 0: no clip from below
        (0.5, -1.0, 0.8, 0.0),  # A < 0: clipped from below
        (1.5, -1.0, 1.5, 1.5),  # A < 0: no clip from above
        (4.0, -1.0, 3.0, 0.0),  # dual clip at c = 3
    ],
)
def test_vanilla_branches(w, advantage, loss, slope):
    assert reference.vanilla_token(math.log(w), advantage, 0.2, 0.2, 3.0) == pytest.approx((loss, slope))


def test_splitmix64_gives_its_published_first_output():
    # First output of SplitMix64 seeded with 0 is mix64(G) = 0xE220A8397B1DCDAF (Vigna's reference implementation).
    assert uniforms_by_hand.mix64(uniforms_by_hand.GOLDEN) == 0xE220A8397B1DCDAF
