"""Run the laboratory: tables, figures, and a record of what was run, into one directory."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas

from verl_sis.study.collected import RESOLUTION, ROUNDING, Collected
from verl_sis.study.laboratory import Settings, by_k, by_sequence, side_by_side
from verl_sis.study.laboratory_figures import COLLECTED_FIGURES, FIGURES, FigureSpec, draw

TABLES = {"side_by_side": side_by_side, "by_k": by_k, "by_sequence": by_sequence}
"""Name of each table of synthetic policies, which is its CSV file, and what makes it."""

COLLECTED_TABLES = {"collected_side_by_side": side_by_side, "collected_by_k": by_k}
"""The same of collected policies."""

ADVANTAGES = "drawn, not those of training: standard normal for each token of a top-K, and one for all of the rest"
STANDARD_ERRORS = "over draws of the advantages; the error from the choice of contexts is not in them"


def run(settings: Settings, out: Path) -> Iterator[str]:
    """Run everything that is asked of synthetic policies.

    Args:
        settings: Size of the laboratory.
        out: Directory; made if missing. Files of an earlier run are replaced, one by one, complete.

    Yields:
        A line about each file that was written.
    """
    return _run(TABLES, settings, FIGURES, {"settings": asdict(settings)}, out)


def run_collected(policies: Collected, study: Path, out: Path) -> Iterator[str]:
    """Run what can be asked of collected policies.

    Args:
        policies: From the contexts of the study.
        study: Its directory, for the record.
        out: As for ``run``. A record of synthetic policies is replaced, so give the two directories of their own.

    Yields:
        A line about each group of policies, and about each file that was written.
    """
    groups = [group.record() for group in policies.groups]
    yield from map(_description, groups)
    record = {
        "study": str(study.absolute()),
        "groups": groups,
        "seeds": policies.seeds,
        "advantages": ADVANTAGES,
        "standard_errors": STANDARD_ERRORS,
        "resolution_of_the_rest": RESOLUTION,
        "rounding_allowed": ROUNDING,
    }
    yield from _run(COLLECTED_TABLES, policies, COLLECTED_FIGURES, record, out)


def _run(
    makers: dict[str, Callable[[Any], pandas.DataFrame]],
    policies: Settings | Collected,
    figures: Sequence[FigureSpec],
    record: dict[str, Any],
    out: Path,
) -> Iterator[str]:
    out.mkdir(parents=True, exist_ok=True)
    tables = {}
    for name, make in makers.items():
        tables[name] = make(policies)
        _write_text(tables[name].to_csv(index=False), out / f"{name}.csv")
        yield f"{out / name}.csv: {len(tables[name])} rows"
    for figure in figures:
        draw(figure, tables[figure.table], out / f"{figure.name}.png")
        yield f"{out / figure.name}.png: {figure.question} (data: {figure.table}.csv)"
    versions = {name: version(name) for name in ("verl-sis", "torch", "pandas")}
    record = {**record, "versions": versions, "figures": {f.name: f.question for f in figures}}
    _write_text(json.dumps(record, indent=1) + "\n", out / "laboratory.json")
    yield f"{out / 'laboratory.json'}: what was run, and versions"


def _description(group: dict[str, Any]) -> str:
    parts = [f"{group['policies']}: {group['used']} of {group['contexts']} contexts"]
    parts += [f"{count} dropped ({reason})" for reason, count in group["dropped"].items() if count]
    if group["used"]:
        parts.append(f"root mean square of log w {group['log_ratio_rms']:.2g} nats")
        parts.append(f"{100 * group['mean_rest']:.3g} % of the old policy outside its top {group['k']}")
    if group["old_log_prob_is_bfloat16"]:
        parts.append("old log-probs are bfloat16, and their rounding counts as drift")
    return ", ".join(parts)


def _write_text(text: str, path: Path) -> None:
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(text)
    os.replace(scratch, path)
