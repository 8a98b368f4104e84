"""xz and byte counts: hand computation, a model of dictionaries, and laws that sum to one."""

import lzma
import math
import random

import pytest

from jdecode.training import baselines


def bits_by_dictionaries(train: list[bytes], held_out: list[bytes], order: int) -> float:
    """The recursion of the docstring, one byte at a time."""
    followers: dict[bytes, list[int]] = {}
    for content in train:
        for place, byte in enumerate(content):
            for length in range(min(place, order) + 1):
                followers.setdefault(content[place - length : place], []).append(byte)

    def probability(byte: int, context: bytes) -> float:
        shorter = probability(byte, context[1:]) if context else 1 / 256
        seen = followers.get(context, [])
        if not seen:
            return shorter
        different = len(set(seen))
        return (seen.count(byte) + different * shorter) / (len(seen) + different)

    places = [(content, place) for content in held_out for place in range(len(content))]
    return sum(-math.log2(probability(content[i], content[max(i - order, 0) : i])) for content, i in places)


def test_byte_counts_by_hand():
    # Order 0 of "aab": a twice, b once, two different bytes: p(a) = (2 + 2/256) / 5, p(b) = (1 + 2/256) / 5.
    # After a came a and b: p(b | a) = (1 + 2 p(b)) / 4. Nothing came after b: p(a | b) = p(a).
    a, b = (2 + 2 / 256) / 5, (1 + 2 / 256) / 5
    expected = -math.log2(a) - math.log2((1 + 2 * b) / 4) - math.log2(a)
    assert baselines.byte_count_bits([b"aab"], [b"aba"], order=1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("order", [0, 1, 2, 3, 7])
def test_byte_counts_are_those_of_dictionaries(order: int):
    rng = random.Random(order)

    def file(alphabet: bytes) -> bytes:
        return bytes(rng.choice(alphabet) for _ in range(rng.randrange(13)))  # some empty, some under the order

    # Files of bytes over 127 would show a signed shift; the last letter is never seen in training.
    train = [file(b"ab\x00\xff") for _ in range(40)]
    held_out = [file(b"ab\x00\xff\x81") for _ in range(17)]
    expected = bits_by_dictionaries(train, held_out, order)
    assert baselines.byte_count_bits(train, held_out, order) == pytest.approx(expected, rel=1e-12)


def test_contexts_do_not_cross_files():
    # Joined, "a" would be followed by "b". Apart, nothing follows it, and p(b | a) = p(b) = (1 + 2/256) / 4.
    b = (1 + 2 / 256) / 4
    assert baselines.byte_count_bits([b"a", b"b"], [b"ab"], order=1) == pytest.approx(-2 * math.log2(b), rel=1e-12)
    assert baselines.byte_count_bits([b"ab"], [b"a", b"b"], order=1) == pytest.approx(-2 * math.log2(b), rel=1e-12)


@pytest.mark.parametrize("context", [b"", b"h", b"th", b"the", b"xyz", b"\x00he"])
def test_each_law_sums_to_one(context: bytes):
    train = [b"the other then", b"he is there", b"th"]
    before = baselines.byte_count_bits(train, [context])
    laws = [baselines.byte_count_bits(train, [context + bytes([byte])]) - before for byte in range(256)]
    assert sum(2**-bits for bits in laws) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("order", [-1, 8])
def test_order_out_of_range_is_refused(order: int):
    with pytest.raises(ValueError, match="order: expected a count from 0 to 7, got"):
        baselines.byte_count_bits([b"a"], [b"a"], order)


def test_nothing_to_count_leaves_every_byte_alike():
    assert baselines.byte_count_bits([], [b"abc"]) == 24


def test_xz_finds_what_the_training_files_said_far_before():
    content = random.Random(5).randbytes(3000)
    assert 3000 < baselines.xz_num_bytes(content) < 3100  # nothing to find, and a header
    # 9 MiB lie between: out of reach of every preset under 7, whose windows hold 8 MiB at most.
    before = content + bytes(9 * 2**20)
    added = baselines.xz_num_bytes_after(before, content)
    assert 0 < added < 100
    assert len(lzma.compress(before + content, preset=6)) - len(lzma.compress(before, preset=6)) > 2900


def test_xz_searches_as_hard_as_it_can():
    # Phrases that come again in part: on this text -9e does better than -9 (1,832 bytes to 1,840 with liblzma 5).
    rng = random.Random(0)
    words = [bytes(rng.choices(b"abcdefgh", k=rng.randrange(2, 9))) for _ in range(40)]
    text: list[bytes] = []
    for _ in range(800):
        if text and rng.random() < 0.5:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randrange(2, 12)]
        else:
            text.append(rng.choice(words))
    content = b" ".join(text)
    assert baselines.xz_num_bytes(content) == len(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))


def test_all_three_stand_beside_each_other():
    # 30 lines of training, of which the held-out file repeats some: what was learned helps more than the file itself.
    lines = [b"def function_%d(self, value):\n    return self.value_%d + value\n" % (7 * i, i * i) for i in range(30)]
    train, held_out = [b"".join(lines), b"class Other:\n"], [lines[11] + lines[2], b"pass\n"]
    found = baselines.baselines(train, held_out)
    assert [entry.name for entry in found] == [
        "xz -9e",
        "xz -9e after the training files",
        "order-3 byte counts of the training files",
    ]
    num_bytes = len(held_out[0]) + 5
    assert {entry.num_bytes for entry in found} == {num_bytes}
    joined = b"".join(train)
    alone, after, counts = (entry.num_bits for entry in found)
    extreme = 9 | lzma.PRESET_EXTREME
    assert alone == 8 * len(lzma.compress(b"".join(held_out), preset=extreme))
    with_training = lzma.compress(joined + b"".join(held_out), preset=extreme)
    assert after == 8 * (len(with_training) - len(lzma.compress(joined, preset=extreme)))
    assert counts == pytest.approx(bits_by_dictionaries(train, held_out, 3), rel=1e-12)
    assert [entry.bits_per_byte for entry in found] == [bits / num_bytes for bits in (alone, after, counts)]
