"""What the rows of several tables share: columns of a group, of a comparison, of the paper; words on missing cells."""

from collections.abc import Iterable

from verl_sis.tables.cells import Cell, Group, compare
from verl_sis.tables.methods import Method
from verl_sis.tables.paper import PAPER_K, REFERENCE, PaperValue, knows, paper_value
from verl_sis.tables.statistics import DRAWS, LEVEL
from verl_sis.tables.table import Column, Value

GROUP = (Column("model", "model"), Column("task", "task"), Column("N", "N", "number"), Column("replay", "replay"))
"""Columns that say what a row is about."""

COMPARISON = (
    Column("gain", "gain", "measured"),
    Column("interval", f"{LEVEL:.0%} interval", "interval"),
    Column("pairs", "pairs", "number"),
    Column("p", "p", "number", 4),
    Column("smallest_p", "smallest p", "number", 4),
)
"""Columns of a paired comparison of averages."""

PAPER = Column("paper", "paper", "number")
OF_REFERENCE = Column("paper_reference", f"paper ({REFERENCE[0]}, {REFERENCE[1]})", "number")

COMPARISON_CAPTION = (
    "Gain: difference of averages in points over the seeds (data.seed) that both have, mean ± standard error; "
    f"interval: paired bootstrap over these seeds ({DRAWS} resamples, percentiles). p: exact two-sided sign-flip test; "
    "smallest p: what so few pairs give at best, 2/2^n."
)

MEAN_CAPTION = "Points: 100 times verl's held-out mean; mean ± standard error over n seeds, without error for n = 1."

PAPER_CAPTION = (
    "The paper states no seeds and no errors, and not for which N and which replay its numbers hold: they stand beside "
    "every N without replay."
)


def group_cells(group: Group) -> dict[str, Value]:
    """Values of ``GROUP``.

    Args:
        group: The group.
    """
    return {"model": group.model, "task": group.task, "N": group.staleness, "replay": group.replay}


def comparison_cells(first: Cell | None, second: Cell | None) -> dict[str, Value]:
    """Values of ``COMPARISON``; empty where there is nothing to compare.

    Args:
        first: The base.
        second: What is compared with it.
    """
    result = compare(first, second) if first and second else None
    if result is None:
        return {}
    interval = None if result.low is None or result.high is None else (result.low, result.high)
    return {
        "gain": result.gain,
        "interval": interval,
        "pairs": result.gain.n,
        "p": result.p,
        "smallest_p": result.smallest_p,
    }


class PaperColumn:
    """Numbers of one of the paper's tables: beside ours where model and task are ours, else in a column apart."""

    def __init__(self, table: str, groups: Iterable[Group]) -> None:
        """Look at what there is.

        Args:
            table: "Table 1", ...
            groups: That will be shown.
        """
        self._table = table
        self._sources: set[str] = set()
        known = [knows(table, group.model, group.task) for group in groups]
        self.columns = (PAPER,) * any(known) + (OF_REFERENCE,) * (not all(known))

    def cells(self, group: Group, method: str | None) -> dict[str, Value]:
        """Values of the columns.

        Args:
            group: The group.
            method: As the paper's table names it; None if it does not have it.
        """
        found = self.value(group, method)
        if found is None:
            return {}
        self._sources.add(found.source)
        return {(PAPER if knows(self._table, group.model, group.task) else OF_REFERENCE).key: found.value}

    def value(self, group: Group, method: str | None) -> PaperValue | None:
        """The number, of the group's model and task, or else of the reference.

        Args:
            group: The group.
            method: As above.
        """
        if method is None or group.replay != "off":
            return None
        where = (group.model, group.task) if knows(self._table, group.model, group.task) else REFERENCE
        return paper_value(self._table, *where, method)

    @property
    def caption(self) -> list[str]:
        """Sources of the numbers that were used, and what is not known about them."""
        if not self._sources:
            return []
        return [f"The paper's numbers: {self._table}; source: {' | '.join(sorted(self._sources))}.", PAPER_CAPTION]


def paper_name(method: Method) -> str | None:
    """Name of a method in the paper's Table 1; None if it cannot be one of its rows.

    Args:
        method: Ours.
    """
    if method.sis is None:
        return method.base
    is_same_k = method.sis.top_k == PAPER_K.get(method.base, method.sis.top_k)
    return f"{method.base}+SIS" if method.sis.is_paper and is_same_k else None


_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
_CLIP = "actor_rollout_ref.actor.clip_ratio"
_UNCLIPPED = f"{_CLIP}_low=1.0 {_CLIP}_high=1e9 {_CLIP}_c=1e9"

_MAKES = {
    "GRPO": ("grpo", f"{_LOSS}=vanilla {_CLIP}_low=0.2 {_CLIP}_high=0.2"),
    "DAPO": ("dapo", f"{_LOSS}=vanilla {_CLIP}_low=0.2 {_CLIP}_high=0.28 algorithm.filter_groups.enable=true"),
    "GSPO": ("gspo", f"{_LOSS}=gspo {_CLIP}_low=0.0003 {_CLIP}_high=0.0004"),
    "CISPO": ("cispo", f"{_LOSS}=cispo {_CLIP}_low=10 {_CLIP}_high=0.2"),
    "w/o clip": ("no_clip", f"{_LOSS}=vanilla {_UNCLIPPED}"),
    "w/o IS": ("no_is", f"{_LOSS}=gpg"),
}
"""Variant of the recipes, and overrides of verl's ppo_trainer, that make a base algorithm."""


def makes(base: str, top_k: int | None, replay: str) -> str:
    """What to run for a missing method.

    Args:
        base: Name of the algorithm.
        top_k: K of SIS; None without SIS.
        replay: Routing replay.
    """
    variant, overrides = _MAKES[base]
    routes, ending = (
        ("", "") if replay == "off" else (f" +routing_replay@_global_={replay.lower()}", f"_{replay.lower()}")
    )
    if top_k is None:
        return f"recipe variant {variant}{ending}, or {overrides}{routes}"
    further = f" actor_rollout_ref.actor.policy_loss.sis.top_k={top_k}"
    preset = "+sis@_global_=grpo " + _UNCLIPPED if base == "w/o clip" else f"+sis@_global_={variant}"
    return f"recipe variant {variant}_sis{ending} with{further}, or {preset}{further}{routes}"


def missing(group: Group, label: str, base: str, top_k: int | None) -> str:
    """A sentence on a missing cell.

    Args:
        group: Where it is missing.
        label: Its name in the table.
        base: Its algorithm.
        top_k: As in ``makes``.
    """
    return f"{group}: {label}; {makes(base, top_k, group.replay)}"


def unpaired(first: Cell | None, second: Cell | None) -> list[str]:
    """Sentences on seeds that only one of two cells has, and that the comparison leaves out.

    Args:
        first: The base.
        second: What is compared with it.
    """
    if not first or not second:
        return []
    return [
        f"{there.group}: seed {seed} of {there.label} has no counterpart among the seeds of {other.label}"
        for there, other in ((first, second), (second, first))
        for seed in sorted(set(there.runs) - set(other.runs))
    ]
