"""Studies made up from policies that are known in full, so that every trace of a cause is there."""

import numpy as np
import torch

from verl_sis.core.by_k import acceptance_by_k, sampled_rank
from verl_sis.core.envelope import TopK
from verl_sis.records.schema import Header
from verl_sis.records.write import write_tokens
from verl_sis.study.collect.rows import engine_columns
from verl_sis.study.summary import summarize

KS = (1, 5, 10, 20, 50)
VOCABULARY = 400


def log_softmax(x):
    shifted = x - x.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def nucleus(log_prob, top_p):
    """-inf outside the smallest set with probability ``top_p``, renormalised."""
    order = np.argsort(-log_prob, axis=1)
    ordered = np.exp(np.take_along_axis(log_prob, order, axis=1))
    keep = np.empty_like(order, dtype=bool)
    np.put_along_axis(keep, order, ordered.cumsum(axis=1) - ordered < top_p, axis=1)
    kept = np.where(keep, log_prob, -np.inf)
    return kept - np.log(np.where(keep, np.exp(log_prob), 0.0).sum(axis=1, keepdims=True))


def policies(tokens, *, noise=0.01, seed=0):
    """Logits of a trainer in float32, and rounded copies of it: the trainer itself, and the engine."""
    rng = np.random.default_rng(seed)
    ranks = np.argsort(rng.random((tokens, VOCABULARY)), axis=1) + 1.0
    exact = -rng.uniform(0.8, 2.0, (tokens, 1)) * np.log(ranks) + 0.3 * rng.standard_normal((tokens, VOCABULARY))
    rounded = [exact + noise * rng.standard_normal(exact.shape) for _ in range(2)]
    return exact, *rounded


def top_k_of(log_prob, sampled, k):
    order = np.argsort(-log_prob, axis=1, kind="stable")[:, :k]
    values = np.take_along_axis(log_prob, order, axis=1)
    own = np.take_along_axis(log_prob, sampled[:, None], axis=1)[:, 0]
    return TopK(
        torch.as_tensor(order.astype(np.int32)),
        torch.as_tensor(values.astype(np.float32)),
        torch.as_tensor(own.astype(np.float32)),
        torch.as_tensor((order == sampled[:, None]).any(axis=1)),
    )


def study_columns(tokens=4000, length=20, *, temperature=1.0, top_p=1.0, hidden_top_p=1.0, drift=0.0, seed=0):
    """Columns of a collected study.

    Args:
        tokens: Rows.
        length: Tokens of a response.
        temperature: Of the engine, where the trainer has 1.
        top_p: Of the engine, in what it reports too.
        hidden_top_p: Of the sampling alone; the engine reports unfiltered log-probs.
        drift: Standard deviation in logits by which the engine's weights are others.
        seed: Of everything.
    """
    rng = np.random.default_rng(seed + 1)
    exact, trainer_logits, engine_logits = policies(tokens, seed=seed)
    engine_logits = engine_logits + drift * rng.standard_normal(exact.shape)
    trainer, precise = log_softmax(trainer_logits), log_softmax(exact)
    engine = nucleus(log_softmax(engine_logits / temperature), top_p)
    drawn_from = np.exp(nucleus(engine, hidden_top_p))
    thresholds = rng.random((tokens, 1)) * drawn_from.sum(axis=1, keepdims=True)
    sampled = (drawn_from.cumsum(axis=1) > thresholds).argmax(axis=1)
    again = log_softmax(trainer_logits + 1e-4 * rng.standard_normal(exact.shape))

    def at(log_prob):
        return np.take_along_axis(log_prob, sampled[:, None], axis=1)[:, 0].astype(np.float32)

    columns = {
        "sequence": np.arange(tokens) // length,
        "position": np.arange(tokens) % length,
        "turn": np.zeros(tokens),
        "token": sampled,
        "entropy": -(np.exp(trainer) * trainer).sum(axis=1),
        "rollout_log_prob": at(engine),
        "old_log_prob": at(trainer),
        "native_log_prob": at(trainer),
        "again_log_prob": at(again),
        "precise_log_prob": at(precise),
    }
    ids = torch.as_tensor(sampled)
    for pair, name, old, current in (("engine", "rollout", engine, trainer), ("floor", "native", trainer, again)):
        top_k = top_k_of(old, sampled, KS[-1])
        queried = np.take_along_axis(current, top_k.ids.numpy().astype(np.int64), axis=1)
        rank = sampled_rank(top_k, ids)
        test = acceptance_by_k(KS, top_k, rank, torch.as_tensor(queried), torch.as_tensor(at(current)))
        columns[f"{name}_rank"] = rank.numpy()
        columns[f"{pair}_log_envelope"] = test.log_envelope.numpy()
        columns[f"{pair}_residual_mass"] = test.residual_mass.numpy()
        columns[f"{pair}_acceptance"] = test.acceptance.numpy()
        if pair == "engine":
            columns |= engine_columns(top_k.log_prob.numpy(), queried, rank.numpy(), KS)
    return columns


def with_routes(columns, *, wrong_layer=None, disagreement=0.01, seed=0):
    """The columns with routes of three layers, two experts each, and log-probs under replay."""
    rng = np.random.default_rng(seed)
    rows = len(columns["token"])
    overlap = np.where(rng.random((rows, 3)) < disagreement, 1, 2)
    if wrong_layer is not None:
        overlap[:, wrong_layer] = np.where(rng.random(rows) < 0.9, 0, 2)
    engine, trainer = columns["rollout_log_prob"], columns["native_log_prob"]
    scale = 0.5 if wrong_layer is None else 20.0
    replay = (engine + scale * (trainer - engine)).astype(np.float32)
    pair = {f"replay_{what}": columns[f"engine_{what}"] for what in ("log_envelope", "residual_mass", "acceptance")}
    return {**columns, **pair, "layer_overlap": overlap, "replay_log_prob": replay}


HEADER = Header(kind="collect", ks=KS)
ROUTED = Header(kind="collect", ks=KS, layers=(0, 1, 2), experts_per_token=2)


def write_study(folder, columns, header=HEADER):
    write_tokens(folder / "tokens" / "part-00000.parquet", columns, header)
    return folder


def summary_of(folder, name="made up"):
    return summarize(name, folder)
