"""A conversation over one cache: what is read again, and that nothing else differs from a cold start."""

import copy
import dataclasses

import pytest

from jdecode import config, language_model
from jdecode.decode import prefill
from tests import tiny_model
from tests.speculative import drafts_under_test

# Digits are bytes of their own in this vocabulary (ids 51 to 60), so a reply of digits reads back as the same tokens.
DIGITS = config.SamplingConfig(temperature=1.0, seed=9, allowed_token_ids=tuple(range(51, 61)))

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Turns that are not the last are written in another way.
REWRITING = (
    "{% for m in messages %}[{{ m.role }}{{ '' if loop.last else '*' }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message, please') }}{% endif %}" + PLAIN


def with_template(lm: language_model.LanguageModel, template: str | None) -> language_model.LanguageModel:
    tokenizer = copy.copy(tiny_model.load_text().tokenizer)
    assert tokenizer is not None
    tokenizer.chat_template = template
    return dataclasses.replace(lm, tokenizer=tokenizer)


def model_with_rings() -> language_model.LanguageModel:
    """Makes a model of V=288 with windows of 8 beside a layer without one."""
    window = config.LayerConfig(window=8)
    lm = tiny_model.make(
        vocab_size=288,
        hidden_size=36,
        intermediate_size=44,
        num_heads=6,
        num_kv_heads=3,
        head_dim=10,
        layers=(window, config.LayerConfig(), window),
    )
    return dataclasses.replace(lm, end_token_ids=(2,))


MODELS = {"full": tiny_model.load_text, "rings": model_with_rings}


@pytest.fixture
def fed(monkeypatch):
    """What the prefill was given, call by call."""
    calls = []
    read = prefill.prefill

    def watched(model, params, prompts, cache, **options):
        calls.append([list(prompt) for prompt in prompts])
        return read(model, params, prompts, cache, **options)

    monkeypatch.setattr(prefill, "prefill", watched)
    return calls


def say(session, text: str, num_new: int = 12):
    """Sends a turn and reads the reply; returns its result, and the ids of conversation and reply."""
    before = [*session.messages, {"role": "user", "content": text}]
    reply = session.send(text, max_new_tokens=num_new)
    streamed = "".join(chunk.text for chunk in reply)
    assert reply.result is not None
    assert reply.result.texts == [streamed]
    assert session.messages == [*before, {"role": "assistant", "content": streamed}]
    return reply.result, before


def cold(lm, messages, num_new: int = 12, **options):
    """Returns the reply to a conversation that was read from its start."""
    prompt = lm.encode_chat(messages)
    result = lm.generate([prompt], max_new_tokens=num_new, sampling=DIGITS, **options)
    return prompt, tiny_model.rows(result)[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("slack", [0, 3])
def test_a_turn_reads_only_what_is_new(fed, name, slack):
    lm = with_template(MODELS[name](), PLAIN)
    session = lm.chat_session(sampling=DIGITS, capacity=256, cache=config.CacheConfig(slack=slack))
    held = 0
    for text in ("the hat", "is in the sea", "on it", "no"):
        fed.clear()
        result, messages = say(session, text)
        own_fed = [list(prompt) for (prompt,) in fed]
        prompt, expected = cold(lm, messages)
        assert tiny_model.rows(result) == [expected]
        assert len(expected) == 12
        # All but what the cache holds: conversation and reply so far, short of the reply's last token.
        assert own_fed == [prompt[held:]]
        assert result.stats["prompt_tokens"] == len(prompt) - held
        held = len(prompt) + 11
    # 4 turns are far more than three windows of 8.
    assert held > 60


def test_penalties_see_the_turns_that_are_not_read_again():
    lm = with_template(tiny_model.load_text(), PLAIN)
    penalised = dataclasses.replace(DIGITS, no_repeat_ngram_size=2, repetition_penalty=1.3)
    session = lm.chat_session(sampling=penalised)
    say(session, "the hat")
    result, messages = say(session, "is in the sea")
    prompt = lm.encode_chat(messages)
    expected = lm.generate([prompt], max_new_tokens=12, sampling=penalised)
    assert tiny_model.rows(result) == tiny_model.rows(expected)


def test_reset_forgets():
    lm = with_template(tiny_model.load_text(), PLAIN)
    session = lm.chat_session(system="on the sea", sampling=DIGITS)
    first, messages = say(session, "the hat")
    assert messages[0] == {"role": "system", "content": "on the sea"}
    say(session, "in it")
    session.reset()
    assert session.messages == [{"role": "system", "content": "on the sea"}]
    again, _ = say(session, "the hat")
    assert tiny_model.rows(again) == tiny_model.rows(first)
    assert again.stats["prompt_tokens"] == first.stats["prompt_tokens"] == len(lm.encode_chat(messages))


def test_end_token_is_not_in_the_conversation():
    lm = dataclasses.replace(with_template(tiny_model.load_text(), PLAIN), end_token_ids=(55,))
    session = lm.chat_session(sampling=DIGITS)
    result, _ = say(session, "the hat", num_new=60)
    assert result.finish_reasons == ["stop"] and result.tokens[0, -1] == 55
    assert "4" not in result.texts[0]  # id 55 is the byte "4"
    second, messages = say(session, "in it", num_new=60)
    expected = lm.generate([lm.encode_chat(messages)], max_new_tokens=60, sampling=DIGITS)
    assert tiny_model.rows(second) == tiny_model.rows(expected)


@pytest.mark.parametrize("slack", [0, 3, 200])
@pytest.mark.parametrize("name", MODELS)
def test_template_that_rewrites_earlier_turns(fed, name, slack):
    lm = with_template(MODELS[name](), REWRITING)
    session = lm.chat_session(sampling=DIGITS, capacity=256, cache=config.CacheConfig(slack=slack))
    say(session, "the hat")
    fed.clear()
    result, messages = say(session, "is in the sea")
    ((own_fed,),) = fed
    prompt, expected = cold(lm, messages)
    assert tiny_model.rows(result) == [expected]
    # Both renderings begin with the start token and " [user"; then one has "]" and the other "*".
    assert lm.tokenizer is not None
    common = 1 + len(lm.tokenizer.encode("[user", add_special_tokens=False))
    assert prompt[:common] == lm.encode_chat(messages[:1])[:common]
    # A ring of 8 + 3 slots cannot go back so far, and starts over; one of 208 slots can.
    can_go_back = name == "full" or slack == 200
    assert own_fed == (prompt[common:] if can_go_back else prompt)
    # And on from there.
    result, messages = say(session, "on it")
    assert tiny_model.rows(result) == [cold(lm, messages)[1]]


def test_reply_that_was_not_read_to_its_end_is_no_turn():
    lm = with_template(tiny_model.load_text(), PLAIN)
    session = lm.chat_session(sampling=DIGITS)
    say(session, "the hat")
    kept = list(session.messages)
    reply = session.send("is in the sea", max_new_tokens=12, steps_per_look=1)
    next(iter(reply))
    assert reply.result is None
    assert session.messages == kept
    # A reply that was never begun is none either.
    session.send("he", max_new_tokens=12)
    with pytest.raises(ValueError, match=r"^reply: expected to be read before the next turn or reset"):
        late = session.send("he", max_new_tokens=12)
        session.send("in it", max_new_tokens=12)
        list(late)
    result, messages = say(session, "on it")
    assert messages[:-1] == kept
    assert tiny_model.rows(result) == [cold(lm, messages)[1]]
    result, messages = say(session, "in it")
    assert tiny_model.rows(result) == [cold(lm, messages)[1]]


def test_capacity_of_a_conversation():
    lm = with_template(tiny_model.load_text(), PLAIN)
    prompt = lm.encode_chat([{"role": "user", "content": "the hat"}])
    capacity = len(prompt) + 5
    session = lm.chat_session(sampling=DIGITS, capacity=capacity)
    # What is left is less than what was asked for.
    result, _ = say(session, "the hat", num_new=12)
    assert result.lengths.tolist() == [5] and result.finish_reasons == ["length"]
    kept = list(session.messages)
    needed = len(lm.encode_chat([*kept, {"role": "user", "content": "in it"}]))
    message = rf"^capacity: expected room for more than the {needed} tokens of the conversation, got {capacity}; "
    with pytest.raises(ValueError, match=message) as caught:
        session.send("in it")
    assert "\n" not in str(caught.value)
    assert session.messages == kept
    session.reset()
    again, _ = say(session, "the hat", num_new=3)
    assert tiny_model.rows(again)[0] == tiny_model.rows(result)[0][:3]


def test_capacity_unasked_is_the_trained_length():
    # max_positions of this model is 256, which is under the default of 4,096.
    lm = with_template(tiny_model.load_text(), PLAIN)
    result, _ = say(lm.chat_session(sampling=DIGITS), "the hat", num_new=300)
    assert result.lengths[0] == 256 - len(lm.encode_chat([{"role": "user", "content": "the hat"}]))
    with pytest.raises(ValueError, match=r"^capacity: expected a whole number from 1 to 2147483647, got 0"):
        lm.chat_session(capacity=0)


def test_refusals_leave_the_conversation_as_it_was(fed):
    lm = with_template(tiny_model.load_text(), PLAIN)
    session = lm.chat_session(sampling=DIGITS)
    say(session, "the hat")
    kept = list(session.messages)
    with pytest.raises(ValueError, match=r"^max_new_tokens"):
        session.send("in it", max_new_tokens=0)
    with pytest.raises(ValueError, match=r"^steps_per_look"):
        session.send("in it", steps_per_look=0)
    assert session.messages == kept
    # The cache is still there: only what is new is read.
    fed.clear()
    result, messages = say(session, "in it")
    prompt, expected = cold(lm, messages)
    assert len(fed[0][0]) < len(prompt) // 2
    assert tiny_model.rows(result) == [expected]
    with pytest.raises(ValueError, match="no system message, please"):
        with_template(lm, STRICT).chat_session(system="on").send("the hat")
    with pytest.raises(ValueError, match=r"^chat: expected a model with a chat template"):
        with_template(lm, None).chat_session()
    with pytest.raises(ValueError, match="without a tokenizer"):
        tiny_model.load("llama_gqa").chat_session().send("the hat")


class Scripted(language_model.LanguageModel):
    """A model whose conversation is whatever ids its latest message lists."""

    def encode_chat(self, messages):
        return [int(word) for word in messages[-1]["content"].split()]


def test_cuts_count_together_from_the_longest_text(fed):
    base = model_with_rings()
    lm = Scripted(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base)})
    # Rings of 8 + 20 slots: at its longest (63 tokens) a ring holds positions 35 to 62, so 21 can be taken back.
    session = lm.chat_session(capacity=200, cache=config.CacheConfig(slack=20))
    first = [3 + position * 7 % 280 for position in range(60)]
    scripts = (first, [*first[:45], 100, 101], [*first[:32], 200, 201, 202])
    read = []
    for ids in scripts:
        fed.clear()
        reply = session.send(" ".join(map(str, ids)), max_new_tokens=4)
        assert sum(len(chunk.token_ids) for chunk in reply) == 4
        read.append(len(fed[0][0]))
        cold_result = base.generate([ids], max_new_tokens=4, capacity=200)
        assert reply.result is not None
        assert tiny_model.rows(reply.result) == tiny_model.rows(cold_result)
    # The second keeps 45 of 63. The third would keep 32 of 50, but 50 is not the longest: it starts over.
    assert read == [60, 2, 35]


def test_reply_of_a_forgotten_conversation_does_not_bring_it_back():
    lm = with_template(tiny_model.load_text(), PLAIN)
    session = lm.chat_session(sampling=DIGITS)
    reply = session.send("the hat", max_new_tokens=3)
    session.reset()
    with pytest.raises(ValueError, match=r"^reply: expected to be read before the next turn or reset"):
        list(reply)
    assert session.messages == []


@pytest.mark.parametrize("kind", drafts_under_test.KINDS)
def test_with_a_draft_cuts_count_from_the_longest_text_too(fed, kind):
    base = model_with_rings()
    lm = Scripted(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base)})
    sampling = config.SamplingConfig(temperature=0.8, seed=3)
    # At its longest a ring of 8 + 20 slots held 63 tokens and 4 proposals: 21 of these 67 can be taken back.
    session = lm.chat_session(
        capacity=200,
        sampling=sampling,
        cache=config.CacheConfig(slack=20),
        draft=drafts_under_test.make(kind, base),
        num_draft_tokens=4,
        verify="coupled",
        adaptive_draft=False,
    )
    first = [3 + position % 7 for position in range(60)]
    scripts = (first, [*first[:47], 100, 101], [*first[:46], 100, 101, 102], [*first[:45], 200, 201])
    read = []
    for ids in scripts:
        fed.clear()
        reply = session.send(" ".join(map(str, ids)), max_new_tokens=4)
        assert sum(len(chunk.token_ids) for chunk in reply) == 4
        read.append(len(fed[0][0]))
        plain = base.generate([ids], max_new_tokens=4, capacity=200, sampling=sampling)
        assert reply.result is not None
        assert tiny_model.rows(reply.result) == tiny_model.rows(plain)
        assert reply.result.stats["target_calls"] > 0
    assert read == [60, 2, 3, 47]
