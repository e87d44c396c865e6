"""Facts about invented people: a corpus of sentences, and questions that one of them answers.

The sentences are plain English, so that a real sentence encoder finds them; the people are invented, so that no model
knows the answer without searching.
"""

import random
from dataclasses import dataclass

_NAMES = """
Alice Boris Clara David Elena Felix Greta Henry Irene Jonas Karin Louis Maria Nadia Oscar Petra Quinn Robin Sonja Tomas
Abbott Bishop Carter Dawson Ellis Foster Garner Harper Ingram Jensen Keller Lawson Mercer Norton Osborn Palmer Ramsey
Sutton Turner Walker
"""
_FIRST, _LAST = _NAMES.split()[:20], _NAMES.split()[20:]

_PLACES = "Lisbon Prague Oslo Cairo Lima Quito Delhi Seoul Dublin Vienna Athens Havana"
_PROFESSIONS = "carpenter baker pilot nurse lawyer farmer painter teacher sailor tailor plumber dentist"
_INSTRUMENTS = "violin piano flute cello trumpet guitar drums harp clarinet banjo oboe organ"

RELATIONS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "birthplace": (
        "Where was {person} born?",
        "{person} was born in {value}.",
        tuple(_PLACES.split()),
    ),
    "profession": (
        "What is the profession of {person}?",
        "{person} works as a {value}.",
        tuple(_PROFESSIONS.split()),
    ),
    "instrument": (
        "Which instrument does {person} play?",
        "{person} plays the {value}.",
        tuple(_INSTRUMENTS.split()),
    ),
}
"""Of each relation: its question, its sentence, its values."""

MAX_PEOPLE = len(_FIRST) * len(_LAST)
"""Different names."""


@dataclass(frozen=True)
class Fact:
    """One value of one relation of one person."""

    person: str
    """First and last name."""

    relation: str
    """A key of `RELATIONS`."""

    value: str
    """The answer to the question."""

    @property
    def question(self) -> str:
        """What the user asks, e.g. ``Where was Alice Turner born?``."""
        return RELATIONS[self.relation][0].format(person=self.person)

    @property
    def sentence(self) -> str:
        """What the corpus says, e.g. ``Alice Turner was born in Lisbon.``."""
        return RELATIONS[self.relation][1].format(person=self.person, value=self.value)

    @property
    def query(self) -> str:
        """What a good policy searches for, e.g. ``Alice Turner birthplace``."""
        return f"{self.person} {self.relation}"


def draw(people: int, rng: random.Random) -> list[Fact]:
    """Draw people and all facts about them, in random order of people.

    Args:
        people: How many, at most `MAX_PEOPLE`.
        rng: Source of randomness.

    Returns:
        One fact for each relation of each person; facts of a person stand together.
    """
    names = rng.sample([f"{first} {last}" for first in _FIRST for last in _LAST], people)
    return [
        Fact(name, relation, rng.choice(values)) for name in names for relation, (_, _, values) in RELATIONS.items()
    ]


def words() -> list[str]:
    """Every word of the corpus, the questions and the queries, with the space before it where there is one."""
    text = {*_FIRST, *_LAST, *RELATIONS}
    for question, sentence, values in RELATIONS.values():
        text |= {word.strip(".?") for word in f"{question} {sentence}".split() if "{" not in word} | set(values)
    return sorted({form for word in text for form in (word, f" {word}")})
