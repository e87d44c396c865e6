"""A short supervised warm start, so that the first reward is neither 0 nor 1.

The teacher makes mistakes on purpose. The model learns how to add, and that one may add wrongly: its best guess is
often right while its samples often are not. That is the gap which reinforcement learning closes in a few steps.
"""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from verl_sis.cpu.arithmetic import LEVELS, Problem, draw

IGNORED_LABEL = -100
"""Label of tokens that transformers leaves out of the loss."""


@dataclass(frozen=True)
class WarmStart:
    """Settings of the supervised loop."""

    steps: int = 1000
    """Optimizer steps; each takes about 0.12 s on one core."""

    batch_size: int = 64
    """Problems per step, drawn afresh, equally from all levels."""

    mistakes: float = 0.4
    """Probability that a step of the teacher's solution is wrong."""

    learning_rate: float = 3e-3
    """Peak of AdamW's rate, after a linear warm-up."""

    warmup_steps: int = 50
    """Steps of the linear warm-up; afterwards the rate falls linearly to a tenth of the peak."""


def encode(tokenizer: Any, problem: Problem, solution: str) -> tuple[list[int], list[int]]:
    """Tokenize a problem and a solution as the chat template would.

    Args:
        tokenizer: Of the tiny world.
        problem: Becomes the prompt.
        solution: Becomes the response.

    Returns:
        Token ids of the prompt, and of the response with the end-of-sequence token.
    """
    messages = [{"role": "user", "content": problem.question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    response = [*tokenizer.encode(solution), tokenizer.eos_token_id]
    return list(prompt), response


def train(
    model: Any,
    tokenizer: Any,
    settings: WarmStart,
    held_out: Collection[Problem],
    seed: int,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train the model in place on freshly drawn problems; the result depends on the arguments only.

    Args:
        model: A causal language model of transformers, in fp32.
        tokenizer: Its tokenizer.
        settings: Of the loop.
        held_out: Problems that must not be seen.
        seed: Of the data.
        report: Called after each step with its number, from 1, and its loss in nats per response token.
    """
    rng = random.Random(seed)

    def batch() -> dict[str, Any]:
        problems = [_draw_unseen(held_out, rng) for _ in range(settings.batch_size)]
        rows = [encode(tokenizer, problem, problem.solution(rng, settings.mistakes)) for problem in problems]
        return pad([response_only(*row) for row in rows], tokenizer.pad_token_id)

    fit(model, batch, settings, report)


def fit(
    model: Any,
    batch: Callable[[], dict[str, Any]],
    settings: WarmStart,
    report: Callable[[int, float], None] = lambda step, loss: None,
    bfloat16: bool = False,
) -> None:
    """Train the model in place; its mode is evaluation afterwards.

    Args:
        model: A causal language model of transformers, in fp32.
        batch: Makes the keyword arguments of one call of the model, among them ``labels``.
        settings: Of the loop.
        report: Called after each step with its number, from 1, and its loss in nats per labelled token.
        bfloat16: Run the forward pass in bfloat16; weights and optimizer stay in float32.
    """
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings))
    model.train()
    for step in range(1, settings.steps + 1):
        # Entered anew for each pass: while it lasts, autocast keeps its bfloat16 copies of the weights.
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
            loss = model(**batch()).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        report(step, loss.item())
    model.eval()


def _rate(step: int, settings: WarmStart) -> float:
    """Learning rate after ``step`` steps, as a fraction of the peak."""
    return min(1.0, (step + 1) / settings.warmup_steps) * (1.0 - 0.9 * step / settings.steps)


def _draw_unseen(held_out: Collection[Problem], rng: random.Random) -> Problem:
    while True:
        problem = draw(rng.choice(LEVELS), rng)
        if problem not in held_out:
            return problem


Row = tuple[list[int], list[bool]]
"""Token ids of a sequence, and for each token whether the model is to learn it."""


def response_only(prompt: list[int], response: list[int]) -> Row:
    """A sequence of which the model learns the response.

    Args:
        prompt: Token ids.
        response: Token ids.
    """
    return [*prompt, *response], [False] * len(prompt) + [True] * len(response)


def pad(rows: list[Row], pad_token_id: int) -> dict[str, Any]:
    """Right-pad sequences into the keyword arguments of a causal language model.

    Args:
        rows: Sequences.
        pad_token_id: Fills; it may also occur in the rows, where it is a token like others.

    Returns:
        ``input_ids``, ``labels`` (of what is to be learned) and ``attention_mask``, int64 [rows, longest row].
    """
    import torch

    shape = len(rows), max(len(tokens) for tokens, _ in rows)
    input_ids, labels = torch.full(shape, pad_token_id), torch.full(shape, IGNORED_LABEL)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    for row, (tokens, learned) in enumerate(rows):
        values = torch.tensor(tokens)
        input_ids[row, : len(tokens)] = values
        labels[row, : len(tokens)] = torch.where(torch.tensor(learned), values, IGNORED_LABEL)
        attention_mask[row, : len(tokens)] = 1
    return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}
