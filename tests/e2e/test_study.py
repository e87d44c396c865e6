"""Studies of the tiny mixture with real vLLM and verl in bfloat16: collect, resume, planted causes, the page."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.browser import WIDTHS, opened
from tests.e2e.command import verl_sis
from verl_sis.cpu.environment import cpu_environment
from verl_sis.records.contexts import read_contexts
from verl_sis.records.read import open_study
from verl_sis.study.report.write import write_report
from verl_sis.study.summary import summarize

PLANTED = {
    "none": set(),
    "temperature": {"temperature"},
    "top_p": {"filter"},
    "routes": {"routes", "replay"},
    "stale": {"other_weights"},
}
"""Faults that each planted cause must bring into the verdict."""


@pytest.fixture(scope="module")
def studies(routing_world, tmp_path_factory):
    """A study per planted cause, and the report on all of them."""
    out = tmp_path_factory.mktemp("planted")
    program = Path(__file__).with_name("planted_causes.py")
    environment = cpu_environment(dict(os.environ))
    subprocess.run([sys.executable, program, routing_world, out], check=True, timeout=900, env=environment)
    write_report([out / cause for cause in PLANTED], out / "report")
    return out


@pytest.mark.parametrize("cause", PLANTED)
def test_each_planted_cause_is_named(studies, cause):
    record = json.loads((studies / "report" / "report.json").read_text())
    (section,) = [section for section in record["sections"] if section["name"] == cause]
    findings = {finding["name"]: finding for finding in section["findings"]}
    print(cause, *(f"{finding['level']}: {finding['text']}" for finding in section["findings"]), sep="\n  ")
    assert {name for name, finding in findings.items() if finding["level"] == "fault"} == PLANTED[cause]
    if cause == "temperature":
        value = float(re.search(r"temperature: ([\d.]+)", findings["temperature"]["text"])[1])
        assert abs(value - 1.05) < 0.003
    if cause == "top_p":
        kept = float(re.search(r"at least ([\d.]+) of", findings["filter"]["text"])[1])
        assert 0.85 < kept < 0.95
    if cause == "routes":
        assert "decoder layer 2 do not belong" in findings["routes"]["text"]


def test_a_sound_study_says_what_routing_explains(studies):
    found = summarize("none", studies / "none")
    k3 = {name: found.comparison(name, "k3").value for name in ("engine", "replay", "floor", "trainer_rounding")}
    print(k3, found.explained_by_routing())
    assert k3["floor"] < k3["replay"] < k3["engine"]
    assert found.pair("floor", "accepted").value > found.pair("replay", "accepted").value
    assert found.pair("replay", "accepted").value > found.pair("engine", "accepted").value


@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_in_a_browser(studies, tmp_path, width):
    with opened(studies / "report" / "report.html", WIDTHS[width]) as (page, errors):
        images = page.locator("img")
        shown = images.evaluate_all("all => all.map(i => [i.id, i.complete && i.naturalWidth > 100, i.clientWidth])")
        assert len(shown) == len(list((studies / "report" / "figures").glob("*.png"))) > 30
        assert all(loaded for _, loaded, _ in shown)
        # Nothing is wider than the window, so that a phone need not scroll sideways; tables scroll by themselves.
        assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width]
        assert max(client for _, _, client in shown) <= WIDTHS[width]
        assert page.locator("li.fault").count() == sum(map(len, PLANTED.values()))
        page.locator("summary").first.click()
        assert page.locator("details[open] table tr").count() > 1
        token = page.locator(".example span").first
        assert "acceptance" in token.get_attribute("title")
        page.screenshot(path=tmp_path / f"{width}.png")
        assert errors == []


@pytest.fixture(scope="module")
def collected(routing_world, tmp_path_factory):
    """``verl-sis study collect`` in two processes through Ray, three shards."""
    out = tmp_path_factory.mktemp("collect") / "study"
    arguments = ["study", "collect", routing_world / "model", routing_world / "train.parquet", "-o", out]
    arguments += ["--limit", 24, "--samples", 2, "--max-tokens", 12, "--max-prompt-tokens", 40, "--shard-prompts", 8]
    arguments += ["--contexts", 16]
    verl_sis(*arguments, "--workers", 2)
    return out, arguments


def rows(study):
    files = open_study(study)
    batches = [batch for file in files for batch in file.batches(file.columns)]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in files[0].columns}


def test_collect_resumes_where_it_stopped(collected):
    """On one process instead of two: a shard that is missing is scored again, the others are not touched."""
    out, arguments = collected
    before = rows(out)
    assert sorted(set(before["sequence"].tolist())) == list(range(48))
    assert {len(c.ids) for c in read_contexts(out).values()} == {3 * 16}
    kept = (out / "tokens" / "shard-00000.parquet").stat().st_mtime_ns
    (out / "tokens" / "shard-00001.parquet").unlink()
    (out / "rollouts" / "shard-00002.parquet").unlink()
    verl_sis(*arguments)
    assert (out / "tokens" / "shard-00000.parquet").stat().st_mtime_ns == kept
    # Responses of a finished shard are not needed again.
    assert not (out / "rollouts" / "shard-00002.parquet").exists()
    after = rows(out)
    for name in ("sequence", "position", "token", "rollout_log_prob", "rollout_rank"):
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    # Other ranks, other micro-batches: the float32 trainer agrees to rounding, the bfloat16 one to its noise floor.
    np.testing.assert_allclose(after["precise_log_prob"], before["precise_log_prob"], atol=1e-4)
    assert np.abs(after["native_log_prob"] - before["native_log_prob"]).mean() < 1e-3


def test_collect_refuses_other_settings_and_a_biased_sampling(collected):
    _, arguments = collected
    result = verl_sis(*arguments, "--temperature", 0.9, check=False)
    assert result.returncode == 1
    assert "temperature: 1.0 there, 0.9 now" in result.stderr
    result = verl_sis(*arguments, "--engine", "generation_config=auto", check=False)
    assert result.returncode == 1
    assert "sampling filters of its own" in result.stderr


def test_the_estimator_laboratory_on_collected_policies(collected, tmp_path):
    out, _ = collected
    verl_sis("study", "estimator", out, "--out", tmp_path / "laboratory")
    assert list((tmp_path / "laboratory").glob("*.png"))
