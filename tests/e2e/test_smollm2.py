"""A real language model from the package index, upcycled to a mixture: real vLLM and verl, in bfloat16."""

import json
from pathlib import Path

from tests.e2e.command import verl_sis
from verl_sis.cpu import smollm2
from verl_sis.study.diagnosis import diagnose
from verl_sis.study.summary import summarize

ROOT = Path(__file__).parents[2]
ANSWERS, LENGTH = 4, 48


def test_a_study_of_a_real_mixture(tmp_path):
    model = smollm2.build(ROOT / "runs" / "smollm2", smollm2.SmolLM2(experts=4), quiet=True)
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": chat}) + "\n" for chat in smollm2.prompts(ANSWERS, seed=0)))
    sizes = ["--max-tokens", LENGTH, "--max-prompt-tokens", 128, "--micro-batch-tokens", 1024, "--no-precise"]
    verl_sis("study", "collect", model, prompts, "-o", tmp_path / "study", *sizes)
    found = summarize("smollm2", tmp_path / "study")
    k3 = {name: found.comparison(name, "k3").value for name in ("engine", "replay", "floor")}
    layers = [found.bootstrap.ratio(f"routes.differs@{layer}", "tokens").value for layer in range(30)]
    print(k3, found.explained_by_routing(), f"routes that differ: {sum(layers) / 30:.4f}", found.kappa("engine"))
    assert ANSWERS * 10 < found.pool.rows <= ANSWERS * LENGTH
    # The size that is reported of bfloat16 models of any size; float32 gives 1e-9.
    assert 1e-4 < k3["engine"] < 2e-2
    assert k3["floor"] < 2 * k3["engine"]
    assert 0.001 < sum(layers) / 30 < 0.06
    assert 0.5 < found.pair("engine", "accepted").value < 1.0
    assert [finding.text for finding in diagnose(found) if finding.level == "fault"] == []
    result = verl_sis("report", tmp_path / "study")
    assert "Noise floor" in result.stdout
