"""Tokenizer and transcripts of the tiny world of agentic search, in the shape of Qwen3's.

Turns are ChatML with a newline between them, a tool call is Hermes' JSON between ``<tool_call>`` tags, an observation
is a user turn between ``<tool_response>`` tags. So the run goes through the code of verl that a Qwen3 run does.
"""

import json
from typing import Any

from verl_sis.cpu.facts import Fact, words
from verl_sis.search.observation import observation

SPECIAL_TOKENS = ("<pad>", "<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")

STOP_TOKENS = ("<|endoftext|>", "<|im_end|>")
"""The first ends a text for the model's configuration, as in Qwen3's base models; turns end with the second."""

TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<answer>", "</answer>")
"""One token each, and, as in Qwen3, kept when special tokens are skipped in decoding."""

# Qwen3's own template in its shape, without what it does for system prompts, tools and thinking.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Pieces that a trained tokenizer would have merged.
_PIECES = ('{"', ' {"', '":', ' "', '",', '"}}', "name", "search", "arguments", "query", "user", "assistant", "system")
_PASSAGE_PIECES = ("Doc ", " (Title:")


def build_tokenizer() -> Any:
    """Build a transformers tokenizer with a token for each word of the facts, and for each printable character."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = ["\n", *map(chr, range(32, 127))]
    pieces = dict.fromkeys([*SPECIAL_TOKENS, *TAGS, *characters, *_PIECES, *_PASSAGE_PIECES, *words()])
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    # Longest match first, over the whole text: words where there are any, characters elsewhere.
    model = models.WordPiece(
        vocabulary, unk_token="<unk>", continuing_subword_prefix="", max_input_chars_per_word=100_000
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token=STOP_TOKENS[0],
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tool_call(query: str) -> str:
    """What the policy writes to search."""
    call = json.dumps({"name": "search", "arguments": {"query": query}})
    return f"<tool_call>\n{call}\n</tool_call>"


def transcript(
    tokenizer: Any, fact: Fact, documents: list[dict[str, str]], answer: str
) -> tuple[list[int], list[bool]]:
    """Tokenize a search and an answer, as verl's agent loop would put them together.

    Args:
        tokenizer: Result of `build_tokenizer`.
        fact: Is asked for.
        documents: What the search found, best first.
        answer: What the policy answers.

    Returns:
        Token ids, and of each whether the policy writes it.
    """
    turns = [
        (f"<|im_start|>user\n{fact.question}<|im_end|>\n<|im_start|>assistant\n", False),
        (f"{tool_call(fact.query)}<|im_end|>", True),
        (
            f"\n<|im_start|>user\n<tool_response>\n{observation(documents)}\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n",
            False,
        ),
        (f"<answer>{answer}</answer><|im_end|>", True),
    ]
    tokens: list[int] = []
    written: list[bool] = []
    for text, by_policy in turns:
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens += ids
        written += [by_policy] * len(ids)
    return tokens, written
