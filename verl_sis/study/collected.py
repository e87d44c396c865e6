"""Collected policies for the estimator laboratory: contexts of a study or of a training run as problems.

A context holds two policies at the old one's top-K (``verl_sis.records.contexts``). It becomes a distribution over
those K tokens and one column more, the rest of the vocabulary, which has what is missing to 1.

* V_K', M^, acceptance in V_K' and xi_K' are exact for every K' up to K: the rest is never in V_K'.
* The ratio of the rest is the tail's average, ``sum pi / sum pi_old``, and its square a lower bound of ``E[w^2]`` there
  (Jensen). So the variance of IS is a lower bound. SIS rejects the tail and keeps w: the same is missing from its
  variance, and the quotient of the two lies further from 1 than it should.
* A rest below ``RESOLUTION`` cannot be told from the rounding of float32 log-probs and is set to it.
* Advantages are not those of training, which has one per response and none for tokens that were not sampled. They are
  drawn as for synthetic policies, standard normal, one per column and so one for all of the rest.

Standard errors are over draws of the advantages. The contexts are the same in each, so the error from the choice of
contexts, which is larger where they are of few responses, is not in them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from verl_sis.errors import StudyFileError
from verl_sis.records.contexts import Contexts, read_contexts
from verl_sis.study import estimators as lab
from verl_sis.study.laboratory import KS, log_ratio_rms

RESOLUTION = 1e-6
"""Smallest probability of the rest: half a unit in the last place of float32 logits near 20."""

ROUNDING = 1e-5
"""By how much the probabilities of a top-K may exceed 1 together. A context beyond it is not used."""

_DUMP = "actor_rollout_ref.actor.policy_loss.sis.dump"

DROPPED = ("not_finite", "filtered", "mass_above_one")
"""Why a context is not used: a log-prob is NaN, or infinite under the current policy; an entry has no probability under
the old one (``verl_sis.core.envelope.FILTERED_LOG_PROB`` or less), so that its ratio means nothing; or the top-K of one
of the two has more than all probability."""


@dataclass(frozen=True)
class Group:
    """Collected policies of one pair, and of one age if it is of a training run.

    Attributes:
        name: Of the pair, with the age.
        old: float64 ``[N, K + 1]``, pi_old at its top-K and at the rest.
        current: float64 ``[N, K + 1]``, pi at the same.
        found: Number of contexts that there are.
        dropped: Number of those that were not used, by reason.
        floored: Number of those used with a rest that was set to ``RESOLUTION``, under either policy.
        bfloat16: Whether the old log-probs of all sampled tokens are bfloat16 numbers, as verl's are without
            flash-attention. The log-probs of a context are then off together, by up to 2^-9 of the sampled token's.
    """

    name: str
    old: torch.Tensor
    current: torch.Tensor
    found: int
    dropped: dict[str, int]
    floored: int
    bfloat16: bool

    def problem(self, seed: int) -> lab.Problem:
        """The contexts with advantages of a seed; groups of one size get the same."""
        generator = torch.Generator().manual_seed(seed)
        advantage = torch.randn(self.old.shape, generator=generator, dtype=torch.float64)
        return lab.Problem(self.old, self.current, advantage, lumped=True)

    def record(self) -> dict[str, Any]:
        """What a record of the run says of the group."""
        return {
            "policies": self.name,
            "contexts": self.found,
            "used": len(self.old),
            "dropped": self.dropped,
            "k": self.old.shape[1] - 1,
            "log_ratio_rms": log_ratio_rms(self.problem(0)) if len(self.old) else None,
            "mean_rest": float(self.old[:, -1].mean()) if len(self.old) else None,
            "rest_set_to_resolution": self.floored,
            "old_log_prob_is_bfloat16": self.bfloat16,
        }


@dataclass(frozen=True)
class Collected:
    """The laboratory on collected policies.

    Attributes:
        groups: Groups, in the order of tables and figures.
        seeds: Number of draws of the advantages.
        ks: Sizes of V_K.
    """

    across: ClassVar[str] = "policies"

    groups: tuple[Group, ...]
    seeds: int = 3
    ks: tuple[int, ...] = KS

    def problems(self) -> Iterator[tuple[str, int, lab.Problem]]:
        """Every group that has contexts with every seed, and the problem."""
        for group in self.groups:
            for seed in range(self.seeds) if len(group.old) else ():
                yield group.name, seed, group.problem(seed)


def collected(study: Path, *, seeds: int = 3, most: int | None = None) -> Collected:
    """Read the contexts of a study.

    Args:
        study: Directory of a study, or of a training run's ``sis.dump``, with ``contexts/`` inside.
        seeds: Number of draws of the advantages.
        most: Use at most so many contexts of a group, drawn at random; all of them if None.

    Returns:
        A group for each pair of policies, and of the pair ``update`` for each age.

    Raises:
        StudyFileError: If there are no contexts, none can be used, or a file is not whole or not of the study.
    """
    groups = []
    for pair, contexts in read_contexts(study).items():
        ages = np.unique(contexts.age).tolist() if pair == "update" else [None]
        for age in ages:
            rows = np.arange(len(contexts.age)) if age is None else np.flatnonzero(contexts.age == age)
            if most is not None:
                rows = np.sort(np.random.default_rng(0).permutation(rows)[:most])
            groups.append(_group(pair if age is None else f"{pair}, age {age}", contexts, rows))
    if not any(group.found for group in groups):
        raise StudyFileError(
            f"expected policies in {study / 'contexts'}, found none. Type verl-sis study collect ... --contexts 256 for"
            f" those of rollout engine and trainer, or train with {_DUMP}.every=N {_DUMP}.max_contexts=512 for those of"
            " training, and name the directory that has contexts/ in it"
        )
    if not any(len(group.old) for group in groups):
        dropped = {group.name: group.dropped for group in groups}
        raise StudyFileError(
            f"expected whole policies in {study / 'contexts'}, and none of them is: {dropped}. Filtered ones come from "
            "a sampler with top_p or top_k. Collect with neither: verl-sis study collect ... --contexts 256"
        )
    return Collected(tuple(groups), seeds)


def _group(name: str, contexts: Contexts, rows: np.ndarray) -> Group:
    log_old = contexts.old_log_prob[rows].astype(np.float64)
    log_current = contexts.current_log_prob[rows].astype(np.float64)
    with np.errstate(over="ignore"):
        old, current = np.exp(log_old), np.exp(log_current)
    faults = {
        "not_finite": np.isnan(log_old).any(axis=1) | ~(np.isfinite(log_current) & (current > 0)).all(axis=1),
        "filtered": (old == 0).any(axis=1),
        "mass_above_one": np.maximum(old.sum(axis=1), current.sum(axis=1)) > 1 + ROUNDING,
    }
    used, dropped = np.ones(len(rows), dtype=bool), {}
    for reason in DROPPED:
        dropped[reason] = int((used & faults[reason]).sum())
        used &= ~faults[reason]
    (old, old_floored), (current, current_floored) = _with_rest(old[used]), _with_rest(current[used])
    return Group(
        name=name,
        old=torch.from_numpy(old),
        current=torch.from_numpy(current),
        found=len(rows),
        dropped=dropped,
        floored=int((old_floored | current_floored).sum()),
        bfloat16=_is_bfloat16(contexts, rows[used]),
    )


def _with_rest(top: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities ``[N, K + 1]`` of a top-K and the rest; ``[N]`` bool, whether the rest was set to RESOLUTION."""
    missing = 1 - top.sum(axis=1, keepdims=True)
    policy = np.concatenate([top, missing.clip(min=RESOLUTION)], axis=1)
    return policy / policy.sum(axis=1, keepdims=True), missing[:, 0] < RESOLUTION


def _is_bfloat16(contexts: Contexts, rows: np.ndarray) -> bool:
    sampled = contexts.ids[rows] == contexts.token[rows, None]
    own = np.ascontiguousarray(contexts.old_log_prob[rows][sampled], dtype=np.float32)
    # The low half of a float32 that was a bfloat16 is empty; that of 0 always is.
    own = own[own != 0]
    return len(own) > 0 and not (own.view(np.uint32) & 0xFFFF).any()
