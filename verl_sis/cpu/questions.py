"""Worded questions for a small chat model: varied enough that a study of its answers is not one of a few sentences."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

from verl_sis.errors import SisConfigError

Chat = list[dict[str, str]]
"""The messages of one prompt, each with ``role`` and ``content``."""

MAX_PROMPTS = 10_000
"""Of more different prompts nearly all would be word problems: there are a few hundred of each other kind."""


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


_NAMES = _phrases("Ana, Ben, Chloe, David, Elif, Femi, Grace, Hiro, Ines, Jonas, Kavya, Liam, Mei, Nadia, Omar, Paula")
_THINGS = _phrases("apples, books, candles, coins, eggs, flowers, letters, marbles, pencils, shells, stamps, tickets")
_TOPICS = _phrases(
    "a rainbow, photosynthesis, gravity, the water cycle, inflation, a vaccine, the internet, a black hole, evolution, "
    "an earthquake, a computer program, the seasons, electricity, a democracy, recycling, sleep, a glacier, sound, "
    "the moon's phases, a magnet, yeast in bread, a password, a volcano, the ocean's tides"
)
_READERS = _phrases("a child, a teenager, my grandmother, a tourist, a new student, a busy friend")
_SUBJECTS = _phrases(
    "a lighthouse, the first day of school, a lost dog, winter in the mountains, an old train station, a busy market, "
    "a robot that learns to paint, two sisters and a map, the last leaf of autumn, a night at the sea, a broken clock, "
    "a garden on a roof, a letter that arrives late, a fox in the city, a bakery at dawn, a long journey by bus"
)
_MOODS = _phrases("funny, sad, calm, mysterious, hopeful")
_FORMS = _phrases("short story, poem, dialogue, diary entry")
_AIMS = _phrases(
    "stay healthy, save money, learn a language, sleep better, save water, make new friends, prepare for an exam, "
    "keep a house clean, plan a trip, eat more vegetables, use a phone less, start a garden, write more clearly, "
    "calm down before a talk, be on time, help a neighbour"
)


def _word_problem(rng: random.Random) -> str:
    name, other = rng.sample(_NAMES, 2)
    thing = rng.choice(_THINGS)
    many, few, times = rng.randint(20, 99), rng.randint(2, 19), rng.randint(2, 9)
    return rng.choice(
        (
            f"{name} has {many} {thing} and gives {few} of them to {other}. How many {thing} does {name} have left?",
            f"{name} buys {few} boxes with {times} {thing} each. How many {thing} are that in all?",
            f"{name} and {other} share {few * times} {thing} among {times} friends. How many does each friend get?",
            f"{name} collected {many} {thing} and {other} collected {few} more than {name}. How many do they have "
            "together? Show your work.",
            f"A shop sells {thing} for {times} dollars each. {name} has {many} dollars. How many {thing} can {name} "
            "buy and how much money is left?",
        )
    )


def _explanation(rng: random.Random) -> str:
    topic = rng.choice(_TOPICS)
    reader = rng.choice(_READERS)
    return rng.choice(
        (
            f"Explain {topic} to {reader} in a few sentences.",
            f"What would you tell {reader} about {topic}?",
            f"I want to teach {reader} about {topic}. Where do I start?",
            f"Give {reader} one everyday example that helps to understand {topic}.",
        )
    )


def _text(rng: random.Random) -> str:
    subject = rng.choice(_SUBJECTS)
    mood = rng.choice(_MOODS)
    form = rng.choice(_FORMS)
    return rng.choice((f"Write a {mood} {form} about {subject}.", f"Write the opening of a {mood} {form}: {subject}."))


def _enumeration(rng: random.Random) -> str:
    aim, number = rng.choice(_AIMS), rng.randint(3, 8)
    return rng.choice(
        (
            f"List {number} ways to {aim}.",
            f"Give me {number} tips to {aim}, with one reason for each.",
            f"What are {number} common mistakes of people who want to {aim}?",
            f"Make a plan of {number} steps to {aim}.",
        )
    )


_KINDS: tuple[Callable[[random.Random], str], ...] = (_word_problem, _explanation, _text, _enumeration)


def prompts(count: int, seed: int) -> list[Chat]:
    """Draw different prompts in random order, each one message of a user: word problems, explanations, texts, lists.

    Args:
        count: How many. Fewer prompts of the same seed are the first ones of more.
        seed: Of the draw; equal seeds give equal prompts on every machine.

    Returns:
        The messages of each prompt, as chat templates take them.

    Raises:
        SisConfigError: If ``count`` is negative or above `MAX_PROMPTS`.
    """
    if not 0 <= count <= MAX_PROMPTS:
        raise SisConfigError(f"expected 0 to {MAX_PROMPTS} prompts, found {count}. Lower --count.")
    rng = random.Random(seed)
    # A dictionary keeps the order; what was drawn before adds nothing.
    questions: dict[str, None] = {}
    while len(questions) < count:
        questions[rng.choice(_KINDS)(rng)] = None
    return [[{"role": "user", "content": question}] for question in questions]


def write_prompts(path: Path, count: int, seed: int) -> None:
    """Write prompts as JSON lines ``{"prompt": [{"role": "user", "content": ...}]}``, the whole file or none.

    Args:
        path: Target; its directory is made if missing.
        count: As in `prompts`.
        seed: As in `prompts`.

    Raises:
        SisConfigError: As `prompts`.
    """
    lines = [json.dumps({"prompt": chat}) + "\n" for chat in prompts(count, seed)]
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text("".join(lines))
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
