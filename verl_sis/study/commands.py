"""Command line ``verl-sis study ...``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from verl_sis.console import fail
from verl_sis.errors import SisError

app = typer.Typer(help="Studies away from training.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def collect(
    model: Annotated[str, typer.Argument(help="Directory or hub name of the model.")],
    prompts: Annotated[Path, typer.Argument(help="JSONL or parquet: chat, plain text or token ids, a row each.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory of the study; resumed if it holds one.")],
    samples: Annotated[int, typer.Option(help="Responses per prompt.")] = 1,
    limit: Annotated[int | None, typer.Option(help="At most so many prompts.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest response.")] = 512,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longest prompt.")] = 1024,
    temperature: Annotated[float, typer.Option(help="Of sampling and of the trainer's logits.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Entries of each policy that are kept: the largest K.")] = 50,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32, of both engines.")] = "bfloat16",
    attention: Annotated[str | None, typer.Option(help="In the trainer; flash_attention_2 on GPUs.")] = None,
    workers: Annotated[int, typer.Option(help="Processes, each with one GPU where there are any.")] = 1,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share one rollout engine.")] = 1,
    precise: Annotated[bool, typer.Option(help="Also score with a float32 trainer.")] = True,
    shard_prompts: Annotated[int, typer.Option(help="Prompts in a shard: the unit of resuming.")] = 64,
    micro_batch_tokens: Annotated[int, typer.Option(help="Tokens in a forward pass of the trainer.")] = 8192,
    contexts: Annotated[int, typer.Option(help="Tokens a shard with whole policies, for the laboratory.")] = 256,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    engine: Annotated[list[str] | None, typer.Option(help="Further vLLM argument, name=value (JSON).")] = None,
) -> None:
    """Roll out with vLLM, score with verl's trainer natively, twice, and with R3; one row per token.

    Several GPUs work through Ray: on this machine, or in the cluster of RAY_ADDRESS (OUT must then be shared).
    """
    from verl_sis.study.collect.settings import CollectSettings

    try:
        settings = CollectSettings(
            model=model,
            samples=samples,
            max_tokens=max_tokens,
            max_prompt_tokens=max_prompt_tokens,
            temperature=temperature,
            top_k=top_k,
            dtype=dtype,
            attention=attention,
            precise=precise,
            shard_prompts=shard_prompts,
            micro_batch_tokens=micro_batch_tokens,
            contexts=contexts,
            seed=seed,
            engine=dict(_engine_argument(text) for text in engine or ()),
        )
        _collect(settings, prompts, out.resolve(), limit, workers, tensor_parallel)
    except SisError as error:
        raise fail(error) from error


def _collect(settings: Any, prompts: Path, out: Path, limit: int | None, workers: int, tensor_parallel: int) -> None:
    from transformers import AutoTokenizer

    from verl_sis.study.collect.prompts import read_prompts
    from verl_sis.study.collect.run import Collection, collect, model_facts

    facts = model_facts(settings.model)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    tokenized = read_prompts(prompts, tokenizer, limit=limit, max_tokens=settings.max_prompt_tokens)
    collection = Collection(settings, tokenized, out)
    columns = (TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as bars:
        tasks = {stage: bars.add_task(stage, total=len(collection.shards)) for stage in ("rollouts", "scores")}

        def show(stage: str, done: int, total: int) -> None:
            bars.update(tasks[stage], completed=done, total=total)

        collect(collection, facts, workers=workers, tensor_parallel=tensor_parallel, progress=show)
    typer.echo(f"{out}: complete. Next: verl-sis report {out}")


def _engine_argument(text: str) -> tuple[str, Any]:
    import json

    from verl_sis.errors import SisConfigError

    name, separator, value = text.partition("=")
    if not separator or not name:
        raise SisConfigError(f"--engine takes name=value, got {text!r}. Type --engine gpu_memory_utilization=0.8")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


@app.command()
def estimator(
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for tables (CSV) and figures (PNG).")],
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Study or sis_dump with contexts/; without, synthetic policies."),
    ] = None,
    contexts: Annotated[
        int | None, typer.Option(min=2, help="Per seed [128]; of DIR, at most, per group [all].")
    ] = None,
    vocabulary: Annotated[int | None, typer.Option(min=20, help="Size V of synthetic policies [2048].")] = None,
    seeds: Annotated[int, typer.Option(min=2, help="Seeds: of all, or of the advantages on the policies of DIR.")] = 3,
) -> None:
    """Bias, variance and error of IS, clipped IS, TIS, CISPO, IcePop and SIS, exactly.

    On synthetic policies; or on those of a study or a training run, up to their top-K.
    """
    try:
        for line in _estimator(out, directory, contexts, vocabulary, seeds):
            typer.echo(line)
    except SisError as error:
        raise fail(error) from error


def _estimator(
    out: Path, directory: Path | None, contexts: int | None, vocabulary: int | None, seeds: int
) -> Iterator[str]:
    from verl_sis.errors import SisConfigError

    try:
        from verl_sis.study.collected import collected
        from verl_sis.study.laboratory import Settings
        from verl_sis.study.laboratory_run import run, run_collected
    except ImportError as error:
        raise SisConfigError(f"studies need more packages ({error}). Type: pip install 'verl-sis[study]'") from error
    if directory is None:
        contexts, vocabulary = contexts or Settings.contexts, vocabulary or Settings.vocabulary
        return run(Settings(contexts=contexts, vocabulary=vocabulary, seeds=seeds), out)
    if vocabulary is not None:
        raise SisConfigError(
            f"--vocabulary is of synthetic policies, and {directory} has its own. Leave one of them out"
        )
    return run_collected(collected(directory, seeds=seeds, most=contexts), directory, out)


def write(paths: list[Path], out: Path | None) -> None:
    """Write a report and print its verdict; the command ``verl-sis report``.

    Args:
        paths: Studies and logs.
        out: Directory; by default ``report`` inside the only path, if that is a directory.
    """
    from verl_sis.errors import SisConfigError

    try:
        if out is None and (len(paths) > 1 or not paths[0].is_dir()):
            raise SisConfigError("several inputs, or a file, need a directory for the report. Type -o DIR")
        folder = out or paths[0] / "report"
        try:
            from verl_sis.study.report.write import write_report
        except ImportError as error:
            raise SisConfigError(
                f"reports need more packages ({error}). Type: pip install 'verl-sis[study]'"
            ) from error
        for section in write_report(paths, folder):
            if section.findings:
                typer.echo(f"{section.name}: {section.subtitle}")
            for finding in section.findings:
                typer.echo(f"  {finding.level}: {finding.text}")
        typer.echo(f"{folder / 'report.html'}")
    except SisError as error:
        raise fail(error) from error
