"""Sizes and names of memory."""

import pytest

from jdecode.parallel import known_devices


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("16GiB", 17_179_869_184),
        (" 16 gib ", 17_179_869_184),
        ("16GB", 16_000_000_000),
        ("1.5MiB", 1_572_864),
        ("0.5TiB", 549_755_813_888),
        ("64KiB", 65_536),
        ("2TB", 2_000_000_000_000),
        ("300MB", 300_000_000),
    ],
)
def test_sizes(text, num_bytes):
    own = known_devices.memory(text)
    assert (own.num_bytes, own.name, own.platform) == (num_bytes, text.strip(), None)


# https://docs.cloud.google.com/tpu/docs/tpu7x and /v5e; NVIDIA's data sheets.
@pytest.mark.parametrize(
    ("name", "num_bytes", "platform"),
    [
        ("v5e", 16 * 1024**3, "tpu"),
        ("v5p", 95 * 1024**3, "tpu"),
        ("V6E", 32 * 1024**3, "tpu"),
        ("h100-80gb", 80 * 1000**3, "gpu"),
        ("a100-40gb", 40 * 1000**3, "gpu"),
        ("t4", 16 * 1000**3, "gpu"),
        ("colab-cpu", 12_700_000_000, "cpu"),
    ],
)
def test_names(name, num_bytes, platform):
    own = known_devices.memory(name)
    assert (own.num_bytes, own.platform, own.name) == (num_bytes, platform, name.lower())


def test_names_are_distinct_and_no_sizes():
    names = [device.name for device in known_devices.DEVICES]
    assert len(set(names)) == len(names) and all(name == name.lower() for name in names)
    assert not [name for name in names if name[0].isdigit()]


@pytest.mark.parametrize("text", ["", "16", "GiB", "16GX", "-1GiB", "1e3GiB", "v5", "h100", "16 Gi B"])
def test_others_are_refused_with_the_known_ones(text):
    with pytest.raises(ValueError) as refused:
        known_devices.memory(text)
    message = str(refused.value)
    assert message.startswith("expected a size such as 16GiB or the name of a device, got ")
    assert all(device.name in message for device in known_devices.DEVICES)


def test_near_names_are_named_first():
    with pytest.raises(ValueError, match=r"got 'h100-80g'; did you mean h100-80gb\?"):
        known_devices.memory("h100-80g")


def test_no_byte_is_refused():
    with pytest.raises(ValueError, match="expected a size over 0, got '0GiB'"):
        known_devices.memory("0GiB")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (8 * 2**30, "8 GiB"),
        (8 * 2**30 + 1, "8.00 GiB"),
        (17_000_000_000, "15.83 GiB"),
        (3 * 2**39, "1.50 TiB"),
        (2**20, "1 MiB"),
        (1536, "1.50 KiB"),
        (1023, "1023 B"),
        (0, "0 B"),
    ],
)
def test_size_in_words(num_bytes, text):
    assert known_devices.size_text(num_bytes) == text
