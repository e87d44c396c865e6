"""Write a report: one page with everything in it, and beside it each figure, its numbers, and the verdict as JSON."""

import base64
import json
import math
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from verl_sis import __version__
from verl_sis.errors import SisConfigError, StudyFileError
from verl_sis.study.report.figures import FigureSpec, panels
from verl_sis.study.report.log_section import log_section, without_duplicates
from verl_sis.study.report.sections import Section, comparison_section, study_section
from verl_sis.study.run_logs import RunLog, find_run_logs
from verl_sis.study.summary import Summary, summarize

TABLE_ROWS = 40
"""Rows of a figure's table that the page itself shows; the CSV has all."""


def read_inputs(paths: Sequence[Path]) -> tuple[list[Summary], list[RunLog]]:
    """Read studies and logs.

    Args:
        paths: Each a study (``tokens/`` inside, or one file of a token table), a training run's directory or log, or
            both in one.

    Returns:
        Studies summed up, and logs.

    Raises:
        StudyFileError: If a path holds neither, or something in it is damaged.
    """
    summaries, logs = [], []
    for path, name in zip(paths, _names(paths), strict=True):
        studies = _study_folders(path)
        for study in studies:
            label = name if len(studies) == 1 else f"{name}/{study.relative_to(path)}"
            summaries.append(summarize(label, study))
        found = [] if path.suffix == ".parquet" else without_duplicates(find_run_logs(path))
        logs += found
        if not studies and not found:
            raise StudyFileError(
                f"expected a study or a training log at {path}, found neither. `verl-sis study collect` makes a study; "
                "training writes one with actor_rollout_ref.actor.policy_loss.sis.dump.every=N, and logs with "
                "trainer.logger=[console,file], tensorboard or wandb"
            )
    return summaries, logs


def write_report(paths: Sequence[Path], out: Path) -> list[Section]:
    """Write a report.

    Args:
        paths: As ``read_inputs`` takes them.
        out: Directory; made if missing. Files of an earlier report are replaced one by one, the page last.

    Returns:
        The sections of the report.

    Raises:
        StudyFileError: As ``read_inputs`` does; nothing is written then.
        SisConfigError: If nothing was given.
    """
    if not paths:
        raise SisConfigError("a report needs at least one study or training log. Type: verl-sis report DIR")
    summaries, logs = read_inputs(paths)
    sections = [study_section(summary) for summary in summaries]
    if len(summaries) > 1:
        sections.insert(0, comparison_section(summaries))
    if logs:
        sections.append(log_section(logs))
    contexts = [_context(section, out) for section in sections]
    record = {"verl_sis": __version__, "sections": [{"name": s.name, **s.record} for s in sections]}
    _replace(out / "report.json", json.dumps(_finite(record), indent=1, default=str).encode())
    names = ", ".join(summary.name for summary in summaries) or ", ".join(log.name for log in logs)
    environment = Environment(
        loader=PackageLoader("verl_sis.study.report", "."),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
    )
    page = environment.get_template("report.html.j2").render(
        title=f"Train-inference mismatch: {names}", version=__version__, sections=contexts
    )
    _replace(out / "report.html", page.encode())
    return sections


def _names(paths: Sequence[Path]) -> list[str]:
    """Last parts of the paths, as many as tell them apart."""
    resolved = [path.resolve() for path in paths]
    for count in range(1, 20):
        names = ["/".join(path.parts[-count:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    raise SisConfigError(f"a report got the same path twice: {', '.join(str(path) for path in paths)}")


def _study_folders(path: Path) -> list[Path]:
    """The study at a path, or the dumps inside a run's directory; empty if there are none."""
    if path.suffix == ".parquet" or (path / "tokens").is_dir() or any(path.glob("*.parquet")):
        return [path]
    return sorted({folder.parent for folder in path.rglob("tokens") if any(folder.glob("*.parquet"))})


def _context(section: Section, out: Path) -> dict[str, Any]:
    """What the template needs of a section; writes its figures and tables."""
    return {
        "name": section.name,
        "subtitle": section.subtitle,
        "findings": section.findings,
        "numbers": section.numbers,
        "figures": [_figure(section, spec, out) for spec in section.figures],
        "examples": section.examples,
    }


def _figure(section: Section, spec: FigureSpec, out: Path) -> dict[str, Any]:
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{section.name}-{spec.name}")
    images = []
    for number, image in enumerate(panels(spec), start=1):
        name = f"{slug}-{number}" if spec.panels > 1 else slug
        _replace(out / "figures" / f"{name}.png", image)
        # Width and height stand in the first chunk of a PNG file; with them the page does not jump while it loads.
        width, height = struct.unpack(">II", image[16:24])
        images.append({"id": name, "png": base64.b64encode(image).decode(), "width": width, "height": height})
    _replace(out / "data" / f"{slug}.csv", spec.table.to_csv(index=False).encode())
    html = spec.table.head(TABLE_ROWS).to_html(index=False, border=0, float_format=lambda x: f"{x:.4g}", na_rep="")
    return {
        "title": spec.title,
        "explanation": spec.explanation,
        "images": images,
        "csv": f"{slug}.csv",
        "html": html,
    }


def _finite(value: Any) -> Any:
    """JSON has no NaN: null stands for it."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}")
    scratch.write_bytes(content)
    os.replace(scratch, path)
