"""Which algorithm a run's configuration is: a table of rules on settings, never the name of a directory."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from verl_sis.errors import StudyFileError
from verl_sis.tables.configuration import Configuration

NO_CLIP = 1e3
"""Clip bounds from here on never bind: no ratio of a run that trains gets there."""

OTHER = "other: "
"""Begin of the name of a combination that no rule knows."""


@dataclass(frozen=True)
class LossFacts:
    """What decides the name of the base algorithm.

    Attributes:
        loss: verl's registered policy loss; under SIS, the base loss.
        clip_low: Distance of the lower clip bound from 1.
        clip_high: Distance of the upper clip bound from 1.
        clip_c: Bound of the dual clip, for negative advantages.
        advantage: ``algorithm.adv_estimator``.
        filter_groups: Whether groups of equal reward are sampled anew.
        bypass: Whether the rollout engine's policy is the old one.
        importance: Level of the correction from rollout engine to trainer ("token", "sequence"), or None.
        importance_threshold: One bound, or "low_high".
        rejection: Level of rejection by the mismatch, or None.
    """

    loss: str
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float = 3.0
    advantage: str = "grpo"
    filter_groups: bool = False
    bypass: bool = False
    importance: str | None = None
    importance_threshold: str = "2.0"
    rejection: str | None = None


def _unclipped(facts: LossFacts) -> bool:
    """A ratio is positive, so a lower bound of 1 - 1 never binds; the dual clip must be out of reach, too."""
    return facts.clip_low >= 1 and facts.clip_high >= NO_CLIP and facts.clip_c >= NO_CLIP


def _symmetric(facts: LossFacts) -> bool:
    return facts.clip_low == facts.clip_high < 1 and not facts.filter_groups


def _clips_higher(facts: LossFacts) -> bool:
    return facts.clip_low < 1 and facts.clip_low < facts.clip_high < NO_CLIP


def _always(_: LossFacts) -> bool:
    return True


BASES: tuple[tuple[str, str, Callable[[LossFacts], bool]], ...] = (
    ("GRPO", "vanilla", _symmetric),
    ("DAPO", "vanilla", _clips_higher),
    ("GSPO", "gspo", lambda facts: facts.clip_high < 1),
    ("CISPO", "cispo", lambda facts: facts.clip_high < NO_CLIP),
    ("w/o clip", "vanilla", _unclipped),
    ("w/o IS", "gpg", _always),
    ("Clip-Cov", "clip_cov", _always),
    ("KL-Cov", "kl_cov", _always),
    ("DPPO-TV", "dppo_tv", _always),
    ("DPPO-KL", "dppo_kl", _always),
    ("SAPO", "sapo", _always),
    ("GMPO", "geo_mean", _always),
    ("DRO", "dro", _always),
)
"""Name, registered policy loss, and condition; the first that holds is the name. verl's ``gpg`` has no ratio."""

_BOUND = r"[0-9.]+(?:e[+-]?\d+)?"

CORRECTIONS: tuple[tuple[str, str | None, str], ...] = (
    ("", None, r".*"),
    (" + TIS", "token", _BOUND),
    (" + IcePop", "token", rf"{_BOUND}_{_BOUND}"),
)
"""Suffix of the name, level and form of the threshold of ``algorithm.rollout_correction``."""

ADVANTAGES = ("grpo", "grpo_vectorized")
"""Advantage estimators of the family; with another one, the loss alone does not make the algorithm."""

ORDER = [name for name, _, _ in BASES]
"""Order of the algorithms in tables, before all others."""


def base_algorithm(facts: LossFacts) -> str:
    """Name an algorithm without SIS.

    Args:
        facts: Of the run.

    Returns:
        A name of ``BASES`` with a suffix of ``CORRECTIONS``, or ``OTHER`` and what was found.
    """
    base = next((name for name, loss, holds in BASES if loss == facts.loss and holds(facts)), None)
    suffix = next(
        (
            suffix
            for suffix, level, form in CORRECTIONS
            if level == facts.importance and re.fullmatch(form, facts.importance_threshold)
        ),
        None,
    )
    if base and suffix is not None and facts.advantage in ADVANTAGES and not facts.bypass and not facts.rejection:
        return base + suffix
    found = {
        "clip": f"{facts.clip_low:g}/{facts.clip_high:g}/{facts.clip_c:g}",
        "advantage": facts.advantage,
        "filter_groups": facts.filter_groups or None,
        "bypass": facts.bypass or None,
        "rollout_is": facts.importance and f"{facts.importance} {facts.importance_threshold}",
        "rollout_rs": facts.rejection,
    }
    return f"{OTHER}{facts.loss}, " + ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)


@dataclass(frozen=True, order=True)
class Sis:
    """Settings of SIS that make a method.

    Attributes:
        top_k: K.
        estimator: "sampled" (the paper) or "expected".
        outside_top_k: "reject" (the paper) or "envelope" (the authors' release).
        behavior: Whose top-K.
    """

    top_k: int
    estimator: str = "sampled"
    outside_top_k: str = "reject"
    behavior: str = "old"

    @property
    def is_paper(self) -> bool:
        """Whether all but K is as in the paper."""
        return (self.estimator, self.outside_top_k, self.behavior) == ("sampled", "reject", "old")

    def __str__(self) -> str:
        """K, and what differs from the paper."""
        parts = [f"K={self.top_k}"]
        if self.estimator != "sampled":
            parts.append(self.estimator)
        if self.outside_top_k != "reject":
            parts.append(f"outside top-K: {self.outside_top_k}")
        if self.behavior != "old":
            parts.append(f"behavior {self.behavior}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Method:
    """A row of the tables.

    Attributes:
        base: Name of the algorithm without SIS.
        sis: Settings of SIS, None without.
        staleness: N, the optimizer steps on one rollout.
        replay: "off", "R2" or "R3".
    """

    base: str
    sis: Sis | None
    staleness: int
    replay: str

    @property
    def label(self) -> str:
        """Name without N and replay, which are columns."""
        return self.base if self.sis is None else f"{self.base} + SIS ({self.sis})"

    @property
    def order(self) -> tuple:
        """Sort key: N, replay, algorithm, base before SIS, K."""
        name = self.base.partition(" + ")[0]
        rank = ORDER.index(name) if name in ORDER else len(ORDER)
        return (
            self.staleness,
            self.replay != "off",
            self.replay,
            rank,
            self.base,
            self.sis is not None,
            self.sis or (),
        )


def method_of(config: Configuration) -> Method:
    """Derive the method of a run.

    Args:
        config: Of the run.

    Raises:
        StudyFileError: A setting that decides is absent or not valid.
    """
    facts, sis = loss_facts(config), None
    if config.need(f"{_LOSS}.loss_mode") == "sis":
        sis = Sis(
            config.integer(f"{_LOSS}.sis.top_k", 1),
            *(str(config.need(f"{_LOSS}.sis.{name}")) for name in ("estimator", "outside_top_k", "behavior")),
        )
    return Method(base_algorithm(facts), sis, staleness(config), replay(config))


_ACTOR = "actor_rollout_ref.actor"
_LOSS = f"{_ACTOR}.policy_loss"
_CORRECTION = "algorithm.rollout_correction"


def loss_facts(config: Configuration) -> LossFacts:
    """Collect what ``base_algorithm`` needs.

    Args:
        config: Of the run.
    """
    mode = config.need(f"{_LOSS}.loss_mode")
    # verl's rule: the bounds fall back on clip_ratio.
    clip = config.number(f"{_ACTOR}.clip_ratio")
    return LossFacts(
        loss=config.need(f"{_LOSS}.sis.base_loss") if mode == "sis" else mode,
        clip_low=float(config.get(f"{_ACTOR}.clip_ratio_low", clip)),
        clip_high=float(config.get(f"{_ACTOR}.clip_ratio_high", clip)),
        clip_c=float(config.get(f"{_ACTOR}.clip_ratio_c", 3.0)),
        advantage=str(config.need("algorithm.adv_estimator")),
        filter_groups=bool(config.get("algorithm.filter_groups.enable", False)),
        bypass=bool(config.get(f"{_CORRECTION}.bypass_mode", False)),
        importance=config.get(f"{_CORRECTION}.rollout_is"),
        importance_threshold=str(config.get(f"{_CORRECTION}.rollout_is_threshold", "")),
        rejection=config.get(f"{_CORRECTION}.rollout_rs"),
    )


def staleness(config: Configuration) -> int:
    """N: optimizer steps that are made on one rollout.

    Args:
        config: Of the run.

    Raises:
        StudyFileError: The mini-batch does not divide the rollout.
    """
    prompts = config.integer("data.train_batch_size", 1)
    mini_batch = config.integer(f"{_ACTOR}.ppo_mini_batch_size", 1)
    if prompts % mini_batch:
        raise StudyFileError(
            f"{config.path}: expected data.train_batch_size to be a multiple of {_ACTOR}.ppo_mini_batch_size, so that "
            f"N is an integer, found {prompts} and {mini_batch}. Leave this run out"
        )
    return prompts // mini_batch * config.integer(f"{_ACTOR}.ppo_epochs", 1)


_SECTIONS = {"fsdp": "fsdp_config", "fsdp2": "fsdp_config", "megatron": "megatron", "veomni": "veomni"}
"""Engine to the section that holds its routing replay."""


def replay(config: Configuration) -> str:
    """Routing replay: "off", "R2" or "R3".

    Args:
        config: Of the run.

    Raises:
        StudyFileError: The engine, or the mode, is not known.
    """
    engine = config.need(f"{_ACTOR}.strategy")
    if engine not in _SECTIONS:
        raise StudyFileError(
            f"{config.path}: expected {_ACTOR}.strategy to be one of {', '.join(_SECTIONS)}, found {engine!r}"
        )
    key = f"{_ACTOR}.{_SECTIONS[engine]}.router_replay.mode"
    mode = config.get(key, "disabled")
    if mode not in ("disabled", "R2", "R3"):
        raise StudyFileError(f"{config.path}: expected {key} to be disabled, R2 or R3, found {mode!r}")
    return "off" if mode == "disabled" else mode
