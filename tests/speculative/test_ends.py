"""Ends in mid-block: end tokens, limits and stop strings leave text and stream as in plain decoding.

``tiny_model.RepeatPrompt`` makes each row write its prompt again, and a scripted draft proposes just that, so that a
test says how many proposals are accepted and where in the block the text ends.
"""

import pytest

from jdecode.decode import loop
from tests import tiny_model
from tests.speculative import drafts_under_test

G = 4
SCRIPT = [40, 51, 62, 73, 84, 95, 106, 117, 128, 139, 150, 161]


def run(scripts, *, draft=None, **options):
    """Returns the chunks and the result of rows that write ``scripts``."""
    lm = tiny_model.load_text()
    given = {} if draft is None else {"draft": draft, "num_draft_tokens": G, "adaptive_draft": False}
    options = {"max_new_tokens": 12, "transforms": [tiny_model.RepeatPrompt()], **given, **options}
    stream = lm.stream(scripts, **options)
    chunks = list(stream)
    assert stream.result is not None
    for row, tokens in enumerate(tiny_model.rows(stream.result)):
        own = [chunk for chunk in chunks if chunk.row == row]
        assert "".join(chunk.text for chunk in own) == stream.result.texts[row]
        assert [token for chunk in own for token in chunk.token_ids] == tokens
        assert [chunk.finish_reason for chunk in own][-1] == stream.result.finish_reasons[row]
    return stream.result


def assert_alike(result, plain):
    assert tiny_model.rows(result) == tiny_model.rows(plain)
    assert result.texts == plain.texts
    assert result.finish_reasons == plain.finish_reasons


@pytest.mark.parametrize("num_right", [0, 2, 64])
def test_an_end_token_at_every_place_of_the_block(num_right):
    draft = drafts_under_test.ScriptedDraft((num_right,))
    round_len, places = min(num_right, G) + 1, set()
    for place in range(1, G + 4):
        # The first token comes from the prompt. A round writes what is right and one token of the target's own, so the
        # end is a proposal, or that token.
        num_rounds = -(-place // round_len)
        places.add((place - 1) % round_len)
        for steps in (1, loop.ALL_TOKENS):
            options = {"stop_token_ids": [SCRIPT[place]], "steps_per_look": steps}
            plain, result = run([SCRIPT], **options), run([SCRIPT], draft=draft, **options)
            assert tiny_model.rows(result) == [SCRIPT[: place + 1]]
            assert result.finish_reasons == ["stop"]
            assert_alike(result, plain)
            assert result.stats["target_calls"] == num_rounds
            assert result.stats["accepted"] == place - place // round_len
    assert places == set(range(round_len))


def test_the_limit_at_every_place_of_the_block():
    draft = drafts_under_test.ScriptedDraft((64,))
    for limit in range(1, G + 5):
        result = run([SCRIPT], draft=draft, max_new_tokens=limit)
        assert tiny_model.rows(result) == [SCRIPT[:limit]]
        assert result.finish_reasons == ["length"]
        # One token comes from the prompt; a round writes at most G + 1, and never proposes past the limit.
        assert result.stats["target_calls"] == -(-(limit - 1) // (G + 1))
        assert result.stats["accepted"] == result.stats["drafted"]


STOPPED_TEXT = " the shore is this hat on the sea"


@pytest.mark.parametrize("steps", [1, 3, loop.ALL_TOKENS])
def test_a_stop_string_in_mid_block(steps):
    tokenizer = tiny_model.load_text().tokenizer
    assert tokenizer is not None
    script = tokenizer.encode(STOPPED_TEXT.strip(), add_special_tokens=False)
    draft, places = drafts_under_test.ScriptedDraft((64,)), set()
    for stop in ("shore", "e is", "this", "hat", "on", "sea", "nowhere"):
        options = {"stop": stop, "steps_per_look": steps, "max_new_tokens": len(script)}
        result = run([script], draft=draft, **options)
        assert_alike(result, run([script], **options))
        # Every proposal is right, whether or not it is part of the text at the end.
        assert result.stats["drafted"] == result.stats["accepted"] > 0
        before, found, _ = STOPPED_TEXT.partition(stop)
        assert (result.texts, result.finish_reasons) == ([before], ["stop" if found else "length"])
        num_tokens = next((num for num in range(1, len(script)) if stop in tokenizer.decode(script[:num])), len(script))
        assert tiny_model.rows(result) == [script[:num_tokens]]
        if found:
            places.add((num_tokens - 2) % (G + 1))  # as above, the first token comes from the prompt
    assert places == set(range(G + 1))


def test_rows_end_at_places_of_their_own():
    # A round of four right proposals ends row after row at each of its places, the last at the target's own token. The
    # last row writes on: one right proposal of the two for which there is room, the target's own, and a token alone.
    end, whole = 162, SCRIPT[:9]
    scripts = [*[[*SCRIPT[:place], end, *SCRIPT[place:]] for place in range(1, G + 2)], whole]
    draft = drafts_under_test.ScriptedDraft((64, 1, 0))
    options = {"stop_token_ids": [end], "max_new_tokens": len(whole)}
    result = run(scripts, draft=draft, **options)
    assert_alike(result, run(scripts, **options))
    assert tiny_model.rows(result) == [*[script[: 2 + row] for row, script in enumerate(scripts[:-1])], whole]
    assert result.finish_reasons == [*["stop"] * (G + 1), "length"]
    assert result.stats["accepted"] == (1 + 2 + 3 + 4 + 4) + (4 + 1)
    assert result.stats["target_calls"] == 3


def test_counts_are_of_what_was_tested():
    # Rounds of three proposals: two accepted, then one accepted that ends the text. After the first token 40, the
    # first round writes 51, 62 and the target's own 73; the second 84, which ends it.
    draft = drafts_under_test.ScriptedDraft((2, 64), num_proposed=(3,))
    result = run([SCRIPT], draft=draft, stop_token_ids=[84])
    assert tiny_model.rows(result) == [SCRIPT[:5]]
    assert result.stats["drafted"] == 6
    assert result.stats["accepted"] == 3
    assert result.stats["acceptance_rate"] == 0.5
    assert result.stats["target_calls"] == 2
    assert result.stats["acceptance_by_place"] == [1.0, 1.0, 0.0, None]


@pytest.mark.parametrize(("steps", "num_on_device"), [(1, 6), (loop.ALL_TOKENS, 12)])
def test_counts_are_of_the_device_loop_and_not_cut_at_a_stop_string(steps, num_on_device):
    # Ids 3 .. 258 are the bytes 0 .. 255: 62 and 73 are ";" and "F". The first token, 40, comes from the prompt; then
    # rounds write four that were accepted and one more. The string is complete with the fourth token, and the loop
    # ends at the next look: after one round, or with the limit.
    draft = drafts_under_test.ScriptedDraft((64,))
    result = run([SCRIPT], draft=draft, stop=";F", steps_per_look=steps)
    assert tiny_model.rows(result) == [SCRIPT[:4]] and result.stats["new_tokens"] == 4
    # A call of the target emits what was accepted, and one token of its own.
    assert result.stats["accepted"] + result.stats["target_calls"] == num_on_device - 1


def test_no_proposals_are_no_error():
    result = run([SCRIPT], draft=drafts_under_test.ScriptedDraft((0,), num_proposed=(0,)))
    assert_alike(result, run([SCRIPT]))
    assert result.stats["drafted"] == result.stats["accepted"] == 0
    assert result.stats["acceptance_rate"] == 0.0
    assert result.stats["target_calls"] == result.stats["target_places"] == 11
