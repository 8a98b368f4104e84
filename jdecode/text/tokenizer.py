"""The tokenizer: text to token ids and back, from a Hugging Face folder or from a GGUF's own vocabulary."""

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jdecode.text import gguf_vocabulary, token_bytes

# A chat model whose template writes one of these ends its reply with it, whatever its files name as the end token.
END_OF_TURN_MARKS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_turn|>", "<end_of_turn>")
# These are control tokens even where a GGUF calls them ordinary ones: reading them in a message would forge a turn.
TURN_MARKS = (
    *END_OF_TURN_MARKS,
    *("<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<|endoftext|>"),
    *("<|end_of_text|>", "<|begin_of_text|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
)

# Precedes a piece of text that does not start the whole. See encode_literal.
_ANCHOR = "\ufdd1jdecode\ufdd1"


class Tokenizer:
    """Turns text into token ids and ids into text.

    Immutable after construction, and safe to share between threads.

    Attributes:
      vocab_size: one more than the greatest id.
      bos_token_id: the id that starts a text, if the vocabulary names one.
      eos_token_ids: ids that end a text or a turn, as the tokenizer's files name them, without repeats.
      chat_template: Jinja source of the model's chat format, if it has one.
      special_ids, special_strings: the control tokens, which ``decode`` can skip.
      prefix_ids, suffix_ids: what ``encode`` puts round a text when it adds special tokens.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
    ) -> None:
        # A length limit or padding in tokenizer.json belongs to training; here it would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._kind = token_bytes.decoder_kind(backend)
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        pre_tokenizer = backend.pre_tokenizer
        self._treats_start_apart = pre_tokenizer is not None and b'"first"' in pre_tokenizer.__getstate__()
        self._token_bytes: dict[int, bytes] = {}
        self._literal_backend: tokenizers.Tokenizer | None = None
        self._literal_lock = threading.Lock()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_strings = tuple(token.content for token in added.values() if token.special)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_token_id = bos_token_id
        self.chat_template = chat_template
        marks = [backend.token_to_id(mark) for mark in END_OF_TURN_MARKS if mark in (chat_template or "")]
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *(mark for mark in marks if mark is not None)]))
        self.prefix_ids = tuple(prefix_ids)
        self.suffix_ids = tuple(suffix_ids)
        named = {"bos": (bos_token_id,), "eos": self.eos_token_ids, "prefix": self.prefix_ids}
        for name, ids in named.items():
            for token_id in ids:
                if token_id is not None:
                    self._check_id(token_id, f"{name} token id")

    @property
    def adds_bos(self) -> bool:
        """Whether ``encode`` starts a text with the BOS token."""
        return self.bos_token_id is not None and self.bos_token_id in self.prefix_ids

    @property
    def strips_first_space(self) -> bool:
        """Whether decoding drops one space at the very start of a text."""
        return self._kind.strips_first_space

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides the ids of a text, in hexadecimal."""
        parts = (self._backend.to_str(), *(str(ids) for ids in (self.prefix_ids, self.suffix_ids, self.eos_token_ids)))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Turns text into token ids.

        Args:
          text: any text, the empty one included.
          add_special_tokens: put the model's BOS (or whatever its files say) round the text. A BOS string that the
            text itself holds is kept beside it.
          parse_special: read control strings in the text as control tokens; otherwise they are ordinary text.

        Returns:
          Token ids.

        Raises:
          TypeError: ``text`` is no string. ValueError: it cannot be written as UTF-8 (a lone surrogate).
        """
        check_text(text)
        ids = (
            self.encode_literal(text) if not parse_special else self._backend.encode(text, add_special_tokens=False).ids
        )
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special_tokens else ids

    def encode_literal(self, text: str, *, starts_text: bool = True) -> list[int]:
        """Encodes a piece of a text in which no control string is read as a control token.

        Args:
          text: the piece.
          starts_text: whether the piece is the first. Some tokenizers of the sentencepiece type put a space before
            the first piece only, so a later one is encoded behind an anchor, which is then dropped.

        Returns:
          Token ids, nothing added.
        """
        check_text(text)
        anchor = _ANCHOR if self._treats_start_apart else ""
        if anchor and anchor in text:
            raise ValueError("text: expected no reserved string U+FDD1 'jdecode' U+FDD1, got one; remove it")
        if starts_text or not anchor:
            return self._literal().encode(text, add_special_tokens=False).ids
        return self._literal().encode(anchor + text, add_special_tokens=False).ids[1:]

    def special_spans(self, text: str) -> list[tuple[int, int, int]]:
        """Finds the control tokens that ``encode`` reads in a text.

        Returns:
          ``(start, end, id)`` of each, in characters, in order.
        """
        check_text(text)
        encoding = self._backend.encode(text, add_special_tokens=False)
        pairs = zip(encoding.offsets, encoding.ids, strict=True)
        return [(start, end, token_id) for (start, end), token_id in pairs if token_id in self.special_ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, continues_text: bool = False) -> str:
        """Turns token ids into text, with no clean-up of spaces. Malformed UTF-8 becomes U+FFFD.

        Args:
          ids: token ids, each under ``vocab_size``.
          skip_special_tokens: leave control tokens out.
          continues_text: the ids follow a text, so that a first space is kept where a tokenizer of the sentencepiece
            type would drop it.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        text = b"".join(self.token_bytes(i, skip_special_tokens=skip_special_tokens) for i in ids)
        decoded = text.decode("utf-8", errors="replace")
        return decoded.removeprefix(" ") if self.strips_first_space and not continues_text else decoded

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """Returns the bytes that an id stands for, none for a skipped control token or a hole in the vocabulary."""
        if skip_special_tokens and token_id in self.special_ids:
            return b""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._kind.token_bytes(self.token_string(token_id), is_added=token_id in self._added_ids)
            self._token_bytes[int(token_id)] = known
        return known

    def token_string(self, token_id: int) -> str:
        """Returns the token as the vocabulary writes it (``Ġthe``, ``▁the``), empty for a hole in the vocabulary."""
        self._check_id(token_id, "token id")
        return self._backend.id_to_token(int(token_id)) or ""

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token as the vocabulary writes it, or None."""
        return self._backend.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """Says whether an id is a control token."""
        self._check_id(token_id, "token id")
        return token_id in self.special_ids

    def first_difference(self, other: "Tokenizer") -> int | None:
        """Returns the lowest id that stands for another string, or for none, in ``other``; ``None`` where all agree."""
        for token_id in range(max(self.vocab_size, other.vocab_size)):
            strings = [
                tokenizer.token_string(token_id) if token_id < tokenizer.vocab_size else None
                for tokenizer in (self, other)
            ]
            if strings[0] != strings[1]:
                return token_id
        return None

    def save(self, folder: str | Path) -> None:
        """Writes ``tokenizer.json`` and ``tokenizer_config.json``, which ``from_folder`` and Hugging Face read.

        Of several end tokens the first is written; ``config.json`` can name the others.

        Args:
          folder: made when absent.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        bos, eos = self.bos_token_id, next(iter(self.eos_token_ids), None)
        values = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None if bos is None else self.token_string(bos),
            "eos_token": None if eos is None else self.token_string(eos),
            "add_bos_token": self.adds_bos,
            "add_eos_token": eos in self.suffix_ids,
            "clean_up_tokenization_spaces": False,
            "chat_template": self.chat_template,
        }
        text = json.dumps({name: value for name, value in values.items() if value is not None}, indent=2)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def _check_id(self, token_id: int, what: str) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(
                f"{what}: expected 0 to {self.vocab_size - 1} (vocabulary of {self.vocab_size}), got {token_id}"
            )

    def _literal(self) -> tokenizers.Tokenizer:
        # A second tokenizer rather than a switched one: switching would change what other threads see. It is made
        # on first use, as few runs need it.
        with self._literal_lock:
            if self._literal_backend is None:
                literal = tokenizers.Tokenizer.from_str(self._backend.to_str())
                literal.encode_special_tokens = True
                if self._treats_start_apart:
                    literal.add_tokens([tokenizers.AddedToken(_ANCHOR, normalized=False, special=False)])
                self._literal_backend = literal
            return self._literal_backend


def check_text(text: str, name: str = "text") -> None:
    """Refuses what is no string, or one that UTF-8 cannot write. ``name`` starts the message."""
    if not isinstance(text, str):
        raise TypeError(f"{name}: expected a string, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: expected Unicode text, got a lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}; remove it"
        ) from None


def from_folder(path: str | Path) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face folder.

    Reads ``tokenizer.json``, and where present ``tokenizer_config.json``, ``special_tokens_map.json`` and
    ``chat_template.jinja``.

    Args:
      path: the folder.

    Returns:
      A tokenizer.

    Raises:
      ValueError: a file is missing or malformed, or uses what is not supported; one line, naming the file.
    """
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        has_model = (folder / "tokenizer.model").is_file()
        hint = (
            "found tokenizer.model, which is not read: convert it to tokenizer.json"
            if has_model
            else "copy it from the model's repository"
        )
        raise ValueError(f"{file}: expected the file tokenizer.json, got none; {hint}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file}: expected a Hugging Face tokenizer, got: {_one_line(error)}") from None
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    bos = _token_id(backend, config.get("bos_token"), file)
    eos = _token_id(backend, config.get("eos_token"), file)
    prefix_ids, suffix_ids = _affixes(backend)
    prefix_ids = _switch(config.get("add_bos_token"), bos, prefix_ids, "add_bos_token", file)
    suffix_ids = _switch(config.get("add_eos_token"), eos, suffix_ids, "add_eos_token", file)
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_ids=() if eos is None else (eos,),
        chat_template=_folder_template(folder, config.get("chat_template")),
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
    )


def from_gguf_fields(fields: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that a GGUF's metadata holds.

    Args:
      fields: metadata key → Python value (``list[str]``, ``list[int]``, ``list[float]``, ``str``, ``int``, ``bool``).
        Keys outside ``tokenizer.`` are not read.

    Returns:
      A tokenizer.

    Raises:
      ValueError: a key is missing or malformed, or names what is not supported; one line, naming the key.
    """
    vocabulary = gguf_vocabulary.build(fields, control_strings=TURN_MARKS)
    return Tokenizer(
        vocabulary.backend,
        bos_token_id=vocabulary.bos_token_id,
        eos_token_ids=vocabulary.eos_token_ids,
        chat_template=vocabulary.chat_template,
        prefix_ids=vocabulary.prefix_ids,
        suffix_ids=vocabulary.suffix_ids,
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{file}: expected JSON, got: {_one_line(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def _token_id(backend: tokenizers.Tokenizer, token: Any, file: Path) -> int | None:
    token = token.get("content") if isinstance(token, dict) else token
    if token is None:
        return None
    found = backend.token_to_id(token) if isinstance(token, str) else None
    if found is None:
        raise ValueError(f"{file}: expected the token {token!r}, which its configuration names, got none")
    return found


def _affixes(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    # What a post-processor puts before and after is seen by letting it work on one letter.
    letter = next((char for char in "xae0 " if backend.encode(char, add_special_tokens=False).ids), "")
    bare = backend.encode(letter, add_special_tokens=False).ids
    whole = backend.encode(letter, add_special_tokens=True).ids
    starts = [start for start in range(len(whole)) if bare and whole[start : start + len(bare)] == bare]
    before = starts[0] if starts else len(whole)
    return tuple(whole[:before]), tuple(whole[before + len(bare) :])


def _switch(switch: bool | None, token_id: int | None, ids: tuple[int, ...], name: str, file: Path) -> tuple[int, ...]:
    # The configuration's switch, where given, overrides the post-processor, as in Hugging Face transformers.
    if switch is None:
        return ids
    if switch and token_id is None:
        raise ValueError(f"{file}: expected a token to add, as {name} is true, got none named")
    if switch:
        return ids if token_id in ids else (*ids, token_id) if token_id is not None else ids
    return tuple(i for i in ids if i != token_id)


def _folder_template(folder: Path, template: Any) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        if "default" not in named:
            raise ValueError(f"{folder}: expected a chat template named default, got {', '.join(map(str, named))}")
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{folder}: expected chat_template as text, got {type(template).__name__}")
    return template


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
