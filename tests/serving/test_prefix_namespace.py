"""What a namespace is made of. That it keeps pages apart is in test_prefix_tree.py."""

import dataclasses

import pytest

from jdecode import config
from jdecode.serving.prefix_namespace import Namespace

BASE = Namespace(model="digest", cache=config.CacheConfig(dtype="float32"))


def test_order_of_extras_does_not_matter_and_salts_are_not_shown():
    one = dataclasses.replace(BASE, extras=(("rope", "a"), ("image", "b")), salt="secret")
    assert one == dataclasses.replace(BASE, extras=(("image", "b"), ("rope", "a")), salt="secret")
    assert one != dataclasses.replace(BASE, extras=(("image", "a"), ("rope", "b")), salt="secret")
    assert "secret" not in repr(one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ""}, "namespace model: expected some text, got ''"),
        ({"model": 3}, "namespace model: expected some text, got another type"),
        ({"adapter": ""}, "namespace adapter: expected some text"),
        ({"salt": b"x"}, "namespace salt: expected some text"),
        ({"cache": config.CacheConfig()}, "expected the dtype that is stored, got 'auto'"),
        ({"cache": "float32"}, "expected a CacheConfig, got 'float32'"),
        ({"extras": (("rope",),)}, "expected pairs"),
        ({"extras": (("rope", ""),)}, "namespace extras rope: expected some text"),
        ({"extras": (("rope", "a"), ("rope", "b"))}, "expected each kind once"),
    ],
)
def test_namespace_of_nothing_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **change)
