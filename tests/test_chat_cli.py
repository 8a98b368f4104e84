"""``python -m jdecode.chat``: turns, commands and ends, from a pipe and from a terminal."""

import io
import sys

import pytest

from jdecode import chat, config
from tests import fake_language_model


@pytest.fixture
def lm(monkeypatch: pytest.MonkeyPatch) -> fake_language_model.FakeLanguageModel:
    return fake_language_model.install(monkeypatch)


def say(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def turns(lm: fake_language_model.FakeLanguageModel) -> list[str]:
    return [arguments.get("text", name) for name, arguments in lm.calls if name in ("send", "reset")]


def test_piped_turns_share_one_session(lm, capsys, monkeypatch: pytest.MonkeyPatch):
    say(monkeypatch, "first\n\nsecond\n/reset\nthird")
    flags = "--weights w --system Brief. --temperature 0.5 --capacity 50 --draft ngram --num-draft-tokens 3"
    assert chat.main(flags.split()) == 0
    out, err = capsys.readouterr()
    assert out == "reply 1\nreply 2\nreply 1\n"
    assert err == ""
    assert turns(lm) == ["first", "second", "reset", "third"]
    assert lm.asked("chat_session") == {
        "sampling": config.SamplingConfig(temperature=0.5),
        "cache": config.CacheConfig(),
        "capacity": 50,
        "system": "Brief.",
        "draft": "ngram",
        "num_draft_tokens": 3,
        "verify": "rejection",
        "adaptive_draft": True,
    }


def test_exit_leaves_before_the_end_of_input(lm, monkeypatch: pytest.MonkeyPatch):
    say(monkeypatch, "first\n/exit\nsecond\n")
    assert chat.main(["--weights", "w", "--max-new-tokens", "5"]) == 0
    assert lm.asked("send") == {"text": "first", "max_new_tokens": 5}


def test_stats_are_printed_when_asked_for(lm, capsys, monkeypatch: pytest.MonkeyPatch):
    say(monkeypatch, "first\n")
    assert chat.main(["--weights", "w", "--stats"]) == 0
    err = capsys.readouterr().err
    # two prompt tokens in half a second; "reply 1" is seven tokens of the fake
    assert "prefill 2 tokens in 0.500 s (4.0 tokens/s)" in err
    assert "decode 7 tokens" in err and "ended by stop" in err


def test_turn_that_does_not_fit_ends_a_pipe_with_one_line(lm, capsys, monkeypatch: pytest.MonkeyPatch):
    say(monkeypatch, "first\ntoo long\nsecond\n")
    assert chat.main(["--weights", "w"]) == 2
    out, err = capsys.readouterr()
    assert out == "reply 1\n"
    assert err.startswith("jdecode.chat: error: prompt: expected at most 9 tokens, got 12; /reset forgets")
    assert err.count("\n") == 1


def test_terminal_says_what_is_wrong_and_goes_on(lm, capsys, monkeypatch: pytest.MonkeyPatch):
    said = iter(["first", "too long", "/rest", "second"])

    def read(prompt: str) -> str:
        assert prompt == "> "
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert chat.main(["--weights", "w"]) == 0
    out, err = capsys.readouterr()
    assert out == "reply 1\nreply 2\n\n"  # the last line end is for the shell's own prompt
    assert "expected at most 9 tokens" in err and "unknown command /rest" in err


def test_config_without_weights_is_refused(lm, capsys):
    assert chat.main(["--config", "llama3_8b.yaml"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jdecode.chat: error: config llama3_8b: it holds shapes for planning")
    assert lm.calls == []


def test_interrupt_ends_with_130(lm, monkeypatch: pytest.MonkeyPatch):
    def interrupt() -> str:
        raise KeyboardInterrupt

    say(monkeypatch, "")
    monkeypatch.setattr(sys.stdin, "readline", interrupt)
    assert chat.main(["--weights", "w"]) == 130
