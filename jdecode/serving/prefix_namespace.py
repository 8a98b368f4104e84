"""Whose keys and values they are: pages are shared only between requests that would compute the same ones."""

import dataclasses

from jdecode import config as config_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Namespace:
    """Everything beside the tokens that changes keys and values, or that says who may share them.

    Two namespaces are one only if every field is the same. Each fact has a field of its own, so that a salt ``"a"`` is
    never taken for an adapter ``"a"``.

    Attributes:
      model: a digest of the weights, the model's config and the dtype that it computes in; not a name, which may come
        to stand for other weights.
      cache: how keys and values are stored, with the dtype resolved.
      adapter: a digest of the adapter's weights, or ``None`` for the base model; not its name either.
      salt: what keeps tenants apart; ``None`` for those that share. It may be a secret and is left out of ``repr``.
      extras: pairs (kind, value) for anything else; each kind once, in any order.

    Raises:
      ValueError: a text is empty, the cache's dtype is ``"auto"``, or a kind occurs twice.
    """

    model: str
    cache: config_lib.CacheConfig
    adapter: str | None = None
    salt: str | None = dataclasses.field(default=None, repr=False)
    extras: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _check_text("model", self.model)
        is_cache = isinstance(self.cache, config_lib.CacheConfig)
        config_lib.check(is_cache, f"namespace cache: expected a CacheConfig, got {self.cache!r}")
        config_lib.check(
            self.cache.dtype != "auto",
            "namespace cache: expected the dtype that is stored, got 'auto'; resolve it to the model's compute dtype",
        )
        for name in ("adapter", "salt"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        for pair in self.extras:
            is_pair = isinstance(pair, tuple) and len(pair) == 2
            config_lib.check(is_pair, f"namespace extras: expected pairs (kind, value), got {pair!r}")
            _check_text("extras kind", pair[0])
            _check_text(f"extras {pair[0]}", pair[1])
        kinds = [kind for kind, _ in self.extras]
        config_lib.check(len(set(kinds)) == len(kinds), f"namespace extras: expected each kind once, got {kinds}")
        object.__setattr__(self, "extras", tuple(sorted(self.extras)))


def _check_text(name: str, value: object) -> None:
    is_text = isinstance(value, str) and value != ""
    config_lib.check(is_text, f"namespace {name}: expected some text, got {'another type' if value else repr(value)}")
