"""The two passes that SIS touches, in real workers of one process, at the sizes of a step of the quickstart.

Steps of whole runs spread by tens of per cent, most of it in the generation, which SIS does not touch. Here the same
workers run with SIS and without, pass by pass in turn, so that a difference of a hundredth of a step is seen.
"""

import statistics
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESPONSES, RESPONSE_LENGTH, MINI_BATCH = 128, 13, 32


def measure_worker_passes(rounds: int, model: Path | None = None) -> dict[str, Any]:
    """Seconds of the old pass and of an update of four mini-batches, with SIS and without.

    Args:
        rounds: Rounds of timing, after one that is not counted.
        model: Folder of the model; the quickstart's own if None.

    Returns:
        ``seconds[pass][way]``, one figure per round, and ``extra_s``, median with SIS less median without, by pass.
    """
    sys.path.insert(0, str(ROOT))
    from tests.worker import harness

    harness.prepare_environment()
    from verl_sis.cpu import tiny_world

    model = model or tiny_world.build(ROOT / "runs" / "tiny_world", quiet=True) / "model"
    with open("/dev/null", "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        workers = {
            way: harness.build_worker(
                harness.Settings(model=model, sis=sis, micro_batch_size=MINI_BATCH, learning_rate=0.0)
            )
            for way, sis in (("base", None), ("SIS", {}))
        }
        rollout = harness.sampled_rollout(workers["base"], RESPONSES, length=RESPONSE_LENGTH)
        seconds: dict[str, dict[str, list[float]]] = {name: {"SIS": [], "base": []} for name in ("old pass", "update")}
        for number in range(rounds + 1):
            for way in sorted(workers, reverse=number % 2 == 1):
                for name, taken in _one_step(harness, workers[way], rollout).items():
                    seconds[name][way].append(taken)
    counted = {name: {way: values[1:] for way, values in ways.items()} for name, ways in seconds.items()}
    extra = {name: statistics.median(ways["SIS"]) - statistics.median(ways["base"]) for name, ways in counted.items()}
    return {"seconds": counted, "extra_s": extra}


def _one_step(harness: Any, worker: Any, rollout: Any) -> dict[str, float]:
    start = time.perf_counter()
    output = harness.old_pass(worker, rollout)
    scored = time.perf_counter()
    old = harness.response_log_probs(output, rollout)
    columns = {"rollout_log_probs": old}
    begin = time.perf_counter()
    harness.update(worker, rollout, old, mini_batch_size=MINI_BATCH, columns=columns)
    return {"old pass": scored - start, "update": time.perf_counter() - begin}
