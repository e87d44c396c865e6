"""Each cause is named where it is, and only there; the policies are known in full."""

import re

import numpy as np
import pytest

from tests.study import tables
from verl_sis.study.causes import temperature
from verl_sis.study.diagnosis import diagnose

FAULTS = {"temperature", "filter", "calibration", "routes", "other_weights", "non_finite", "kappa", "replay"}


def verdict(folder, columns, header=tables.HEADER):
    return diagnose(tables.summary_of(tables.write_study(folder, columns, header)))


def faults(findings):
    return {finding.name for finding in findings if finding.level == "fault"}


def text_of(findings, name):
    return next(finding.text for finding in findings if finding.name == name)


def test_a_sound_study_has_no_fault(tmp_path):
    findings = verdict(tmp_path, tables.with_routes(tables.study_columns()), tables.ROUTED)
    assert faults(findings) == set()
    names = {finding.name for finding in findings}
    assert {"need", "temperature", "floor", "replay", "rounding", "kappa", "certificate", "acceptance"} <= names


@pytest.mark.parametrize("value", [0.95, 1.05])
def test_another_temperature(tmp_path, value):
    findings = verdict(tmp_path, tables.study_columns(temperature=value))
    assert faults(findings) == {"temperature"}
    assert f"{value:.3f}" in text_of(findings, "temperature")
    estimate, explained = temperature(tables.summary_of(tmp_path))
    assert estimate.low < estimate.value < estimate.high
    assert abs(estimate.value - value) < 1e-4
    assert explained > 0.9


def test_half_a_percent_of_temperature_is_within_tolerance(tmp_path):
    assert faults(verdict(tmp_path, tables.study_columns(temperature=1.005))) == set()


def test_top_p(tmp_path):
    findings = verdict(tmp_path, tables.study_columns(top_p=0.9))
    assert faults(findings) == {"filter"}
    (kept,) = re.findall(r"It keeps at least ([\d.]+) of", text_of(findings, "filter"))
    assert 0.89 < float(kept) < 0.91


def test_a_filter_that_the_log_probs_leave_out(tmp_path):
    findings = verdict(tmp_path, tables.study_columns(hidden_top_p=0.9))
    assert "calibration" in faults(findings)
    assert "more often" in text_of(findings, "calibration")


def test_routes_of_one_layer(tmp_path):
    columns = tables.with_routes(tables.study_columns(), wrong_layer=1)
    findings = verdict(tmp_path, columns, tables.ROUTED)
    assert faults(findings) == {"routes", "replay"}
    assert "decoder layer 1 do not belong" in text_of(findings, "routes")


def test_routes_of_all_layers(tmp_path):
    columns = tables.with_routes(tables.study_columns())
    columns["layer_overlap"] = np.zeros_like(columns["layer_overlap"])
    assert "all layers" in text_of(verdict(tmp_path, columns, tables.ROUTED), "routes")


def test_other_weights(tmp_path):
    findings = verdict(tmp_path, tables.study_columns(drift=0.1))
    assert faults(findings) == {"other_weights"}
    assert "stale checkpoint" in text_of(findings, "other_weights")
    assert "rounding" not in {finding.name for finding in findings}


def test_undefined_log_probs_are_counted_and_named(tmp_path):
    columns = tables.study_columns()
    columns["native_log_prob"][:3] = np.nan
    findings = verdict(tmp_path, columns)
    assert faults(findings) == {"non_finite"}
    assert "3 tokens have an undefined log-prob" in text_of(findings, "non_finite")


def test_tokens_of_another_policy_move_kappa(tmp_path):
    """Acceptance of other rows' tokens: what a release did under dynamic batching."""
    columns = tables.study_columns()
    for name in ("engine_log_envelope", "engine_residual_mass"):
        columns[name] = np.roll(columns[name], 1, axis=0)
    columns["engine_log_envelope"] += 0.2
    findings = verdict(tmp_path, columns)
    assert "kappa" in faults(findings)


def test_a_study_of_version_1_leaves_the_later_rules_out(tmp_path):
    columns = {
        name: values
        for name, values in tables.study_columns().items()
        if name not in ("rollout_mass", "rollout_mass_before", "rollout_filtered", "engine_moments")
    }
    from verl_sis.records.schema import Header

    findings = verdict(tmp_path, columns, Header(kind="collect", ks=tables.KS, version=1))
    names = {finding.name for finding in findings}
    assert not {"temperature", "filter", "calibration"} & names
    assert {"floor", "certificate", "acceptance"} <= names


def test_no_k_passes_where_the_tail_is_heavy(tmp_path):
    columns = tables.study_columns()
    columns["engine_residual_mass"] = np.maximum(columns["engine_residual_mass"], 0.3)
    text = text_of(verdict(tmp_path, columns), "certificate")
    assert "does not pass" in text
    assert "No K up to 50 passes" in text


def test_kappa_is_judged_in_standard_errors(tmp_path):
    """A policy that is tested against other envelopes is found; chance of a few standard errors is not."""
    columns = tables.study_columns(8000)
    sound = text_of(verdict(tmp_path / "sound", columns), "kappa")
    assert float(re.search(r"([\d.]+) standard errors", sound)[1]) <= 4.0
    columns["engine_acceptance"] = columns["engine_acceptance"] * 0.96
    findings = verdict(tmp_path / "moved", columns)
    assert [finding.level for finding in findings if finding.name == "kappa"] == ["note"]


def test_a_share_of_routing_that_may_be_nothing_is_not_praised(tmp_path):
    columns = tables.with_routes(tables.study_columns())
    engine, trainer = columns["rollout_log_prob"], columns["native_log_prob"]
    # Under replay other tokens differ by as much.
    columns["replay_log_prob"] = (engine + np.roll(trainer - engine, 1)).astype(np.float32)
    findings = verdict(tmp_path, columns, tables.ROUTED)
    assert [finding.level for finding in findings if finding.name == "replay"] == ["note"]
    assert "overlap" in text_of(findings, "rounding")
