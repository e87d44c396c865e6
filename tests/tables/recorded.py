"""The runs behind the golden output."""

import json

from tests.tables.runs import (
    DAPO,
    NO_CLIP,
    R3,
    SIS,
    TINY,
    TOP_K,
    levels,
    math,
    sis,
    training,
    two_steps,
    write_rows,
    write_run,
)


def write_all(root):
    """Two models, in folders of their own."""
    _write_qwen(root / "qwen")
    _write_tiny(root / "tiny")


def _write_qwen(root):
    """Three algorithms, several K, one to three seeds, R3; a gradient norm that is not finite; versions of one run."""
    for seed, base, with_sis in ((1, 0.40, 0.43), (2, 0.42, 0.44), (3, 0.44, 0.48)):
        seeded = {"data.seed": seed}
        write_run(root / f"a{seed}", two_steps(math(base)), **seeded)
        # Acceptance pooled over tokens: (0.9 * 100 + 0.8 * 300) / 400 = 0.825.
        logged = sis(0.9, 100, 0.002, 0.1 * seed), sis(0.8, 300, 0.004, 0.3 * seed)
        write_run(root / f"b{seed}", two_steps(math(with_sis), *logged), SIS, **seeded)
    for seed in (1, 2):
        one, exact = sis(0.5, 100, 0.2, 0.2), sis(0.95, 100, 1e-7, 0.2)
        write_run(root / f"c{seed}", two_steps(math(0.3), one, one), SIS, **{TOP_K: 1, "data.seed": seed})
        write_run(root / f"d{seed}", two_steps(math(0.45), exact, exact), SIS, **{TOP_K: 64, "data.seed": seed})
        write_run(root / f"e{seed}", two_steps(math(0.46)), **DAPO, **{"data.seed": seed})
    logged = sis(0.9, 100, 0.001, 0.1)
    write_run(root / "f2", two_steps(math(0.5), logged, logged), SIS, **DAPO, **{TOP_K: 30, "data.seed": 2})
    write_run(root / "g1", two_steps(math(0.41), logged, logged), SIS, **NO_CLIP)
    write_run(root / "h1", two_steps(math(0.47)), R3)
    write_run(root / "i1", two_steps(math(0.2)), **{"actor_rollout_ref.actor.clip_ratio_low": 0.3})
    broken = two_steps(math(0.44))
    broken[1]["actor/grad_norm"] = None
    write_rows(root / "a3", broken)
    (root / "a1" / "run.json").write_text(json.dumps({"versions": {"verl": "0.9.1"}}))


def _write_tiny(root):
    """Two levels, with validation before training, and dumped answers."""
    dumped = {"trainer.validation_data_dir": "/elsewhere/answers"}
    logged = sis(0.9, 100, 0.001, 0.1)
    write_run(root / "base", {0: levels(0.25, 0.0), **two_steps(levels(0.5, 0.25))}, **TINY, **dumped)
    rows = {0: levels(0.25, 0.0), 1: training(0.25, **logged), 2: {**training(0.5, **logged), **levels(0.75, 0.5)}}
    write_run(root / "sis", rows, SIS, **TINY, **dumped)
    write_answers(root / "base", [1, 0, 0, 1])
    write_answers(root / "sis", [1, 1, 0, 1])


def write_answers(run, correct, step=2):
    """A dump of a validation as verl writes it: two samples of each problem."""
    (run / "answers").mkdir(exist_ok=True)
    lines = [
        {"input": f"{i // 2}+1=", "output": "?", "gts": str(i // 2 + 1), "score": 0.0, "step": step, "acc": acc}
        for i, acc in enumerate(correct)
    ]
    (run / "answers" / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
