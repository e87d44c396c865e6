"""The tiny world of agentic search: questions, tokens, and transcripts as verl's agent loop puts them together."""

import random
import re

import pytest
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from verl_sis.cpu import search_tokens
from verl_sis.cpu.facts import MAX_PEOPLE, RELATIONS, draw, words
from verl_sis.cpu.search_world import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, SearchWorld, facts_of, to_rows
from verl_sis.rewards.search import exact_match

FACTS = draw(MAX_PEOPLE, random.Random(3))


@pytest.fixture(scope="module")
def tokenizer():
    return search_tokens.build_tokenizer()


def documents(facts):
    return [{"title": fact.person, "text": fact.sentence} for fact in facts]


def test_names_and_facts_are_distinct():
    assert len({fact.person for fact in FACTS}) == MAX_PEOPLE == 400
    assert len({fact.question for fact in FACTS}) == len(FACTS) == 3 * MAX_PEOPLE
    values = [value for _, _, values in RELATIONS.values() for value in values]
    # The answer alone tells which passage it is from.
    assert len(set(values)) == len(values) == 36


def test_no_one_is_in_both_data_sets():
    training, held_out = facts_of(SearchWorld(train_people=5, validation_people=2))
    assert (len(training), len(held_out)) == (15, 6)
    assert not {fact.person for fact in training} & {fact.person for fact in held_out}
    row = to_rows(held_out, "validation")[4]
    assert row["prompt"] == [{"role": "user", "content": held_out[4].question}]
    assert row["reward_model"]["ground_truth"] == {"target": [held_out[4].value]}


def test_settings_make_the_key():
    keys = {world.key for world in (SearchWorld(), SearchWorld(seed=1), SearchWorld(train_people=61))}
    assert len(keys) == 3
    assert SearchWorld().key == SearchWorld().key


def test_words_are_tokens_and_any_text_survives(tokenizer):
    for word in words():
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1
    text = "retrieval failed: http://h:1 ~ Zürich\n\tAlice Turners".replace("ü", "u").replace("\t", " ")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_a_transcript_is_what_verls_agent_loop_builds(tokenizer):
    builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen3_moe")
    fact, found = FACTS[0], documents(FACTS[:3])
    tokens, written = search_tokens.transcript(tokenizer, fact, found, fact.value)
    user = [{"role": "user", "content": fact.question}]
    built = builder.build_initial_tokens(user)
    mask = [False] * len(built)
    call = {"role": "assistant", "content": search_tokens.tool_call(fact.query)}
    observed = {"role": "tool", "content": search_tokens.observation(found)}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    turns = [call["content"], f"<answer>{fact.value}</answer>"]
    for turn in turns:
        sampled = [*tokenizer.encode(turn, add_special_tokens=False), end]
        built = builder.merge_assistant_tokens(built, sampled).token_ids
        mask += [True] * len(sampled)
        if turn == call["content"]:
            built = builder.merge_context_tokens([*user, call], [*user, call, observed], built).token_ids
            mask += [False] * (len(built) - len(mask))
    assert tokens == built
    assert written == mask


def test_transcripts_fit_and_are_rewarded(tokenizer):
    longest = [sorted(FACTS, key=lambda fact: len(fact.sentence))[-1]] * 3
    tokens, written = search_tokens.transcript(tokenizer, longest[0], documents(longest), longest[0].value)
    prompt = written.index(True)
    assert prompt <= MAX_PROMPT_TOKENS
    # Two searches, though the teacher needs one.
    assert len(tokens) - prompt <= MAX_RESPONSE_TOKENS // 2 + 8
    response = tokenizer.decode(tokens[prompt:], skip_special_tokens=True)
    assert re.findall(r"<tool_call>\n(.*)\n</tool_call>", response) == [
        f'{{"name": "search", "arguments": {{"query": "{longest[0].query}"}}}}'
    ]
    assert exact_match("tiny_search", response, {"target": [longest[0].value]})["score"] == 1.0
    assert exact_match("tiny_search", response, {"target": ["other"]})["score"] == 0.0
