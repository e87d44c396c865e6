"""Kappa is 1 under y ~ pi_old within its own standard error, and leaves it when columns and tokens do not fit."""

import numpy as np
import pytest
import torch

from verl_sis.core.acceptance import accept, acceptance_log_prob, counter_uniforms
from verl_sis.core.envelope import TopK, envelope_terms, log_normalizer, normalize_envelope, select_top_k
from verl_sis.core.metrics import sis_metrics

from ..reference.policies import run_core
from .batches import pool

VOCAB, K, WIDTH = 12, 5, 8


def acceptance_columns(
    old: torch.Tensor, new: torch.Tensor, y: torch.Tensor, keys: torch.Tensor, *, update: int, rule: str = "reject"
):
    """Arguments of ``acceptance_statistics`` for tokens ``y [B, T]`` of logits ``[B, T, V]``."""
    tested = run_core(old.flatten(0, 1), new.flatten(0, 1), y.flatten(), K, outside_top_k=rule)
    shape = y.shape
    uniforms = counter_uniforms(keys[:, None], torch.arange(shape[1]), seed=1, update=update)
    log_prob = torch.log_softmax(new, -1).gather(-1, y[..., None]).squeeze(-1)
    old_log_prob = tested.top_k.sampled_log_prob.view(shape)
    return {
        "mask": torch.ones(shape, dtype=torch.bool),
        "accepted": accept(tested.log_acceptance.view(shape), uniforms),
        "contains_sampled": tested.top_k.contains_sampled.view(shape),
        "log_ratio": log_prob - old_log_prob,
        "log_expected": tested.terms.log_expected_acceptance.view(shape),
        "normalized": torch.ones(shape, dtype=torch.bool),
        "log_envelope": tested.envelope.log_envelope.view(shape),
        "residual_mass": tested.envelope.residual_mass.view(shape),
        "stored_gap": torch.zeros(shape),
        "sample_key": keys,
    }


def sampled_batch(
    sequences: int, copies: int, drift: float, generator: torch.Generator, update: int, rule: str = "reject"
):
    """Acceptance of ``sequences`` responses sampled from random old policies, each ``copies`` times in the batch."""
    old = torch.randn(sequences, WIDTH, VOCAB, generator=generator)
    new = old + drift * torch.randn(sequences, WIDTH, VOCAB, generator=generator)
    y = torch.multinomial(torch.softmax(old, -1).flatten(0, 1), 1, generator=generator).view(sequences, WIDTH)
    keys = torch.randint(-(2**62), 2**62, (sequences,), generator=generator)
    # A copy is the same sequence: same policies, same tokens, same key, and so the same z.
    columns = (column.repeat_interleave(copies, dim=0) for column in (old, new, y, keys))
    return acceptance_columns(*columns, update=update, rule=rule)


@pytest.mark.parametrize("drift", [0.1, 0.7])
@pytest.mark.parametrize(("sequences", "copies"), [(200, 1), (64, 1), (64, 4)])
def test_standard_error_of_kappa_is_calibrated(sequences, copies, drift):
    generator = torch.Generator().manual_seed(sequences + copies)
    scores = []
    for update in range(200):
        metrics = sis_metrics(pool(sampled_batch(sequences, copies, drift, generator, update)))
        scores.append((metrics["sis/kappa"] - 1) / metrics["sis/kappa_se"])
    # 200 scores: the standard error of their sd is 0.05, of their mean 0.07.
    assert 0.8 < np.std(scores) < 1.25
    assert abs(np.mean(scores)) < 0.4
    assert max(map(abs, scores)) < 5


def test_treating_copies_as_independent_would_be_wrong():
    # The calibration above can fail: with a key of its own for each copy, kappa_se is half of what it should be.
    generator = torch.Generator().manual_seed(0)
    scores = []
    for update in range(100):
        columns = sampled_batch(64, 4, 0.7, generator, update)
        columns["sample_key"] = torch.arange(256)
        metrics = sis_metrics(pool(columns))
        scores.append((metrics["sis/kappa"] - 1) / metrics["sis/kappa_se"])
    assert np.std(scores) > 1.5


def shuffled_rows(*, sampled_too: bool, outside_top_k: str = "reject") -> dict[str, float]:
    """Metrics of 2000 sampled tokens tested against the stored top-K of the row before."""
    generator = torch.Generator().manual_seed(3)
    old = torch.randn(2000, 300, generator=generator).mul(3)
    new = old + 0.05 * torch.randn(2000, 300, generator=generator)
    y = torch.multinomial(torch.softmax(old, -1), 1, generator=generator).squeeze(1)
    own = select_top_k(old, y, K, chunk_tokens=64)
    ids, log_prob = own.ids.roll(1, 0), own.log_prob.roll(1, 0)
    if sampled_too:
        stored = TopK(ids, log_prob, own.sampled_log_prob.roll(1, 0), own.contains_sampled.roll(1, 0))
    else:
        stored = TopK(ids, log_prob, own.sampled_log_prob, (ids == y[:, None]).any(-1))
    terms = envelope_terms(new, stored, y)
    normalizer = log_normalizer(new, chunk_tokens=64)
    current = normalize_envelope(terms, normalizer)
    log_a = acceptance_log_prob(
        terms.sampled_logit - stored.sampled_log_prob,
        terms.log_envelope,
        stored.contains_sampled,
        outside_top_k=outside_top_k,
    )
    uniforms = counter_uniforms(torch.arange(2000), torch.tensor(0), seed=0, update=0)
    columns = {
        "mask": torch.ones(2000, dtype=torch.bool),
        "accepted": accept(log_a, uniforms),
        "contains_sampled": stored.contains_sampled,
        "log_ratio": terms.sampled_logit - normalizer - own.sampled_log_prob,
        "log_expected": terms.log_expected_acceptance,
        "normalized": torch.ones(2000, dtype=torch.bool),
        "log_envelope": current.log_envelope,
        "residual_mass": current.residual_mass,
        "stored_gap": (stored.sampled_log_prob - own.sampled_log_prob).abs(),
    }
    batch = {name: column[:, None] for name, column in columns.items()}
    return sis_metrics(pool({**batch, "sample_key": torch.arange(2000)}))


def surplus_in_standard_errors(metrics: dict[str, float]) -> float:
    return (metrics["sis/kappa"] - 1) / metrics["sis/kappa_se"]


def test_kappa_catches_rows_stored_under_another_sample():
    assert abs(surplus_in_standard_errors(shuffled_rows(sampled_too=True))) > 5


def test_kappa_catches_shuffled_columns_under_the_released_rule():
    # Faults 1 and 2 of the release together: columns of another row, no membership test. Acceptance looks healthy.
    metrics = shuffled_rows(sampled_too=False, outside_top_k="envelope")
    assert surplus_in_standard_errors(metrics) > 5


def test_kappa_catches_shuffled_columns_under_the_membership_test():
    # Few sampled tokens lie in another row's V_K, but its envelope is tiny and predicts far more acceptance.
    metrics = shuffled_rows(sampled_too=False)
    assert surplus_in_standard_errors(metrics) < -5


def test_kappa_catches_a_sampler_that_filters():
    # y from the top 3 only (top_k = 3 sampling): likely tokens are over-represented, kappa rises above 1.
    generator = torch.Generator().manual_seed(4)
    old = torch.randn(300, WIDTH, VOCAB, generator=generator)
    new = old + 0.3 * torch.randn(300, WIDTH, VOCAB, generator=generator)
    kept = torch.where(old >= old.topk(3, dim=-1).values[..., -1:], old, -torch.inf)
    y = torch.multinomial(torch.softmax(kept, -1).flatten(0, 1), 1, generator=generator).view(300, WIDTH)
    metrics = sis_metrics(pool(acceptance_columns(old, new, y, torch.arange(300), update=0)))
    assert surplus_in_standard_errors(metrics) > 5


def test_the_released_rule_raises_kappa_above_1_even_where_all_is_aligned():
    # It also accepts outside V_K, which (1 - xi) / M^ does not count: here about a quarter of pi_old lies there.
    generator = torch.Generator().manual_seed(0)
    aligned = sis_metrics(pool(sampled_batch(300, 1, 0.1, generator, 0)))
    released = sis_metrics(pool(sampled_batch(300, 1, 0.1, generator, 1, rule="envelope")))
    assert abs(surplus_in_standard_errors(aligned)) < 4
    assert surplus_in_standard_errors(released) > 5


@pytest.mark.parametrize("sequences", [1, 3, 16, 1000])
def test_surplus_never_exceeds_the_root_of_the_number_of_groups(sequences):
    # All z = 1 where 1/4 is expected. With n equal groups kappa - 1 is sqrt(n) standard errors, n at most 64: a bound
    # of "4 standard errors" says something for more than 16 sequences only.
    columns = sampled_batch(sequences, 1, 0.0, torch.Generator().manual_seed(0), 0)
    columns["accepted"] = torch.ones_like(columns["accepted"])
    columns["log_envelope"] = torch.full_like(columns["log_ratio"], 4.0).log()
    columns["residual_mass"] = torch.zeros_like(columns["log_ratio"])
    columns["sample_key"] = torch.arange(sequences)
    score = surplus_in_standard_errors(sis_metrics(pool(columns)))
    assert score == pytest.approx(min(sequences, 64) ** 0.5, rel=0.01)
