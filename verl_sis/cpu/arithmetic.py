"""A verifiable task of graded difficulty: sums and differences of small numbers, worked out in short steps.

Level 1 has one-digit numbers, level 2 a two-digit and a one-digit number, level 3 two two-digit numbers, level 4 three
numbers. A solution is one chain in which each step adds tens or ones, and a two-digit number is taken in two steps, in
either order, so that a good policy still has choices to make: ``27+18=?`` is solved by ``27+10=37+8=45`` and by
``27+8=35+10=45``.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

LEVELS = (1, 2, 3, 4)

MAX_PROMPT_CHARACTERS = len("27+18-5=?")
MAX_SOLUTION_CHARACTERS = len("29+20=49+9=58+9=67")


@dataclass(frozen=True)
class Problem:
    """One sum: ``numbers[0] + numbers[1] + ...``, with negative numbers for what is subtracted."""

    level: int
    """Difficulty, one of `LEVELS`."""

    numbers: tuple[int, ...]
    """The first is not negative; nor is any partial sum."""

    @property
    def question(self) -> str:
        """What the user asks, e.g. ``27+18=?``."""
        return f"{self.numbers[0]}" + "".join(f"{number:+d}" for number in self.numbers[1:]) + "=?"

    @property
    def answer(self) -> str:
        """The number that a correct solution ends with."""
        return str(sum(self.numbers))

    def solution(self, rng: random.Random, mistakes: float = 0.0) -> str:
        """One solution.

        Args:
            rng: Chooses whether tens or ones come first, where there is a choice, and the mistakes.
            mistakes: Probability that the result of a step is off by 1, 2 or 10. The chain goes on from what it wrote.

        Returns:
            A chain that ends in ``=`` and the answer; without mistakes it is the right one.
        """
        total = self.numbers[0]
        chain = str(total)
        for number in self.numbers[1:]:
            for part in _parts(number, rng):
                total += part
                if rng.random() < mistakes:
                    total = abs(total + rng.choice((-10, -2, -1, 1, 2, 10)))
                chain += f"{part:+d}={total}"
        return chain


def _parts(number: int, rng: random.Random) -> list[int]:
    """Split a number into its tens and its ones, in random order; zeros are left out."""
    sign = 1 if number >= 0 else -1
    parts = [part for part in (sign * (abs(number) // 10 * 10), sign * (abs(number) % 10)) if part]
    rng.shuffle(parts)
    return parts


def draw(level: int, rng: random.Random) -> Problem:
    """Draw a random problem of a level.

    Args:
        level: One of `LEVELS`.
        rng: Source of randomness.
    """
    while True:
        first = rng.randint(0, 9) if level == 1 else rng.randint(10, 29)
        sizes = {1: [(1, 9)], 2: [(1, 9)], 3: [(11, 29)], 4: [(11, 29), (1, 9)]}[level]
        numbers = (first, *(rng.choice((1, -1)) * rng.randint(*size) for size in sizes))
        if all(sum(numbers[:end]) >= 0 for end in range(1, len(numbers) + 1)):
            return Problem(level, numbers)


def distinct(level: int, rng: random.Random) -> Iterator[Problem]:
    """Draw problems of a level without repetition, for as long as there are new ones."""
    seen: set[Problem] = set()
    misses = 0
    while misses < 10_000:
        problem = draw(level, rng)
        if problem in seen:
            misses += 1
            continue
        seen.add(problem)
        yield problem


def is_correct(response: str, answer: str) -> bool:
    """Whether a response ends in the right answer.

    Args:
        response: Text of the response without special tokens.
        answer: `Problem.answer`.
    """
    _, equals, value = response.rpartition("=")
    return bool(equals) and value.strip() == answer
