"""Contexts on disk, made from policies that are known in full."""

import numpy as np

from verl_sis.records.contexts import write_contexts
from verl_sis.study import laboratory

VOCABULARY = 40


def contexts_of(old, current, *, k=None, token=None, age=0):
    """Columns of contexts from probabilities ``[N, V]``: the k largest of the old policy."""
    old, current = np.asarray(old, dtype=np.float64), np.asarray(current, dtype=np.float64)
    ids = np.argsort(-old, axis=1, kind="stable")[:, :k]
    rows = len(ids)
    with np.errstate(divide="ignore"):
        log_old, log_current = (np.log(np.take_along_axis(p, ids, axis=1)) for p in (old, current))
    return {
        "sequence": np.arange(rows),
        "position": np.zeros(rows),
        "token": ids[:, 0] if token is None else np.full(rows, token),
        "age": np.broadcast_to(age, rows),
        "ids": ids,
        "old_log_prob": log_old,
        "current_log_prob": log_current,
    }


def write_study(folder, **pairs):
    for pair, columns in pairs.items():
        write_contexts(folder / "contexts" / f"shard-00000-{pair}.parquet", pair, columns)
    return folder


def whole_problem(contexts=6, drift=0.5):
    settings = laboratory.Settings(contexts=contexts, vocabulary=VOCABULARY)
    return laboratory.synthetic_problem(settings, drift, 0)


def study_of_64(folder):
    """Two pairs, K = 20: the engine's with a context that was filtered, and updates of two ages."""
    whole = whole_problem(contexts=64, drift=0.1)
    engine = contexts_of(whole.old, whole.current, k=20)
    engine["old_log_prob"][5, 19] = -np.inf
    update = contexts_of(whole.old, whole.current, k=20, age=np.arange(64) % 2)
    return write_study(folder, engine=engine, update=update)
