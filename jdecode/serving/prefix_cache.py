"""The prefix cache of a model: prompts that begin as others did read from it what they have in common.

Example::

    prefix_cache = lm.init_prefix_cache(num_pages=256)
    lm.generate(prompt, prefix_cache=prefix_cache)   # computes the prompt, and keeps it
    lm.generate(longer, prefix_cache=prefix_cache)   # computes what is new
    print(prefix_cache.statistics)

What it holds is copied into a request's own cache, so a request never waits for another and cannot harm it. What is
found does not change what is computed: in float32 a text is that of a cold run but for the order of sums.
"""

import dataclasses
import hashlib
import pathlib
from typing import Any

import jax

from jdecode import config as config_lib
from jdecode.cache import allocate, codec_plain, codec_token, layout_full, layout_ring
from jdecode.decode import prompt_reader
from jdecode.models import digest, transformer
from jdecode.serving import device_pages, prefix_files, prefix_folder, prefix_nodes, prefix_reader, prefix_store
from jdecode.serving.prefix_namespace import Namespace

DEFAULT_PAGE_LEN = 16
"""Tokens a page: copies of whole pages are cheap, and little of a last page is wasted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner:
    """The model whose keys and values are held.

    Attributes:
      config, dtype, digest: see ``models.digest``.
      params: those that were digested; others are digested before they are believed.
      mesh: where they and the pages lie.
    """

    config: config_lib.ModelConfig
    dtype: str
    digest: str
    params: Any
    mesh: jax.sharding.Mesh | None

    @classmethod
    def of(cls, model: transformer.Transformer, params: Any, mesh: jax.sharding.Mesh | None) -> "Owner":
        """Digests a model."""
        text = digest.model_digest(model.config, model.dtype, params)
        return cls(config=model.config, dtype=model.dtype, digest=text, params=params, mesh=mesh)

    def accept(self, model: transformer.Transformer, params: Any, mesh: jax.sharding.Mesh | None) -> "Owner":
        """Refuses another model; returns an owner that knows these parameters the next time.

        Raises:
          ValueError: configuration, dtype, a bit of the weights or the devices are others.
        """
        is_like = model.config == self.config and model.dtype == self.dtype
        if not is_like or (params is not self.params and Owner.of(model, params, mesh).digest != self.digest):
            raise ValueError(
                "prefix_cache: expected one that was made for this model, got another model's; make one with "
                "init_prefix_cache"
            )
        if mesh != self.mesh:
            raise ValueError(
                "prefix_cache: expected one on the devices of this model, got one on others; make a new one"
            )
        return dataclasses.replace(self, params=params)


class PrefixCache:
    """A view of what is held, for one tenant. Made by ``LanguageModel.init_prefix_cache``; one thread owns it.

    Attributes:
      cache: layout and dtype of the requests' caches; the dtype is resolved.
    """

    def __init__(
        self, store: prefix_store.PrefixStore, owner: Owner, *, cache: config_lib.CacheConfig, salt_digest: str | None
    ) -> None:
        self._store, self._owner, self._salt_digest = store, owner, salt_digest
        self.cache = cache

    @property
    def statistics(self) -> prefix_store.PrefixCacheStatistics:
        """What it did and holds: all views together."""
        return self._store.statistics

    @property
    def page_len(self) -> int:
        """Z, in tokens."""
        return self._store.device.page_len

    def with_salt(self, salt: str | None) -> "PrefixCache":
        """Returns a view of the same pages that shares nothing with those of other salts.

        Args:
          salt: what keeps tenants apart, perhaps a secret (only a digest of it is kept); ``None`` for those that share.

        Raises:
          ValueError: an empty text.
        """
        return PrefixCache(self._store, self._owner, cache=self.cache, salt_digest=_salt_digest(salt))

    def reader(
        self,
        model: transformer.Transformer,
        params: Any,
        cache: config_lib.CacheConfig,
        *,
        mesh: jax.sharding.Mesh | None = None,
    ) -> prefix_reader.PrefixReader:
        """Returns what reads the prompts of one request.

        Args:
          model, params, mesh: of the request.
          cache: of the request. Texts are shared between requests of one layout, whatever their slack.

        Raises:
          ValueError: another model, another stored dtype, or a cache whose slots cannot be copied (``check_copies``).
        """
        self._owner = self._owner.accept(model, params, mesh)
        resolved = resolve(cache, model.dtype)
        check_dtype(resolved.dtype, self.cache.dtype)
        check_copies(model.config, resolved, model.dtype)
        namespace = Namespace(model=self._owner.digest, cache=resolved, salt=self._salt_digest)
        return prefix_reader.PrefixReader(store=self._store, namespace=namespace)

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes what is held, for all salts, to be read by ``LanguageModel.load_prefix_cache``.

        What the folder held of another prefix cache is replaced at the end, or, where writing fails, not at all. Saves
        of several processes wait for each other, and the last one stays.

        Raises:
          ValueError: it is no folder, or holds other files and no prefix cache.
          OSError: it cannot be written.
        """
        device = self._store.device
        contents = prefix_files.Contents(
            model=self._owner.digest,
            cache=self.cache,
            num_pages=device.num_pages,
            page_len=device.page_len,
            nodes=tuple(self._store.tree.saved()),
        )
        prefix_files.save(folder, contents, device)


def reader_for(
    prefix_cache: PrefixCache | None,
    model: transformer.Transformer,
    params: Any,
    cache: config_lib.CacheConfig,
    *,
    mesh: jax.sharding.Mesh | None,
) -> prompt_reader.PromptReader:
    """Returns what reads the prompts of a request, with a prefix cache or, for ``None``, without.

    Raises:
      TypeError: it is something else.
      ValueError: as ``PrefixCache.reader``.
    """
    if prefix_cache is None:
        return prompt_reader.PlainReader()
    if not isinstance(prefix_cache, PrefixCache):
        raise TypeError(f"prefix_cache: expected a PrefixCache, got {type(prefix_cache).__name__}")
    return prefix_cache.reader(model, params, cache, mesh=mesh)


def make(
    model: transformer.Transformer,
    params: Any,
    *,
    num_pages: int,
    page_len: int = DEFAULT_PAGE_LEN,
    cache: config_lib.CacheConfig = config_lib.CacheConfig(),
    salt: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    page_hash: prefix_nodes.PageHash | None = None,
) -> PrefixCache:
    """Makes an empty prefix cache. See ``LanguageModel.init_prefix_cache``.

    Args:
      page_hash: of the tree; ``None`` for its own. Any function is right.
    """
    if not isinstance(cache, config_lib.CacheConfig):
        raise TypeError(f"cache: expected a CacheConfig, got {type(cache).__name__}")
    salt_digest = _salt_digest(salt)
    store = _make_store(model, resolve(cache, model.dtype), num_pages, page_len, mesh, page_hash)
    owner = Owner.of(model, params, mesh)
    return PrefixCache(store, owner, cache=resolve(cache, model.dtype), salt_digest=salt_digest)


def load(
    folder: str | pathlib.Path,
    model: transformer.Transformer,
    params: Any,
    *,
    mesh: jax.sharding.Mesh | None = None,
    salt: str | None = None,
) -> PrefixCache:
    """Reads what ``PrefixCache.save`` wrote. See ``LanguageModel.load_prefix_cache``.

    What another process saves meanwhile takes the pages away that are being read here: then that is read.
    """
    salt_digest = _salt_digest(salt)
    contents, pages_path = prefix_files.load(folder)
    owner = Owner.of(model, params, mesh)
    while True:
        store = _plant(folder, contents, owner, model, mesh)
        try:
            prefix_files.fill(store.device, pages_path, store.tree.num_pages)
            return PrefixCache(store, owner, cache=contents.cache, salt_digest=salt_digest)
        except ValueError:
            before, (contents, pages_path) = pages_path, prefix_files.load(folder)
            if pages_path == before:
                raise


def _plant(
    folder: str | pathlib.Path,
    contents: prefix_files.Contents,
    owner: Owner,
    model: transformer.Transformer,
    mesh: jax.sharding.Mesh | None,
) -> prefix_store.PrefixStore:
    """Makes the tree that a JSON file tells of, over pages that are still to be filled."""
    if contents.model != owner.digest:
        raise ValueError(
            f"{folder}: expected a prefix cache of this model in {model.dtype} (digest {owner.digest[:12]}), got one "
            f"with digest {contents.model[:12]}; make a new one, or give another folder"
        )
    num_held = sum(len(node.pages) for node in contents.nodes)
    most = max((max(node.tokens, default=0) for node in contents.nodes), default=0)
    with prefix_files.named(pathlib.Path(folder) / prefix_folder.JSON_NAME):
        config_lib.check(num_held <= contents.num_pages, f"expected at most {contents.num_pages} pages, got {num_held}")
        config_lib.check(most < model.config.vocab_size, f"expected token ids of this model, got {most}")
        store = _make_store(model, contents.cache, contents.num_pages, contents.page_len, mesh, None)
        store.tree.pool.allocate(num_held)  # a new pool hands out its pages from 0 on
        store.tree.plant(contents.nodes)
    return store


def _make_store(
    model: transformer.Transformer,
    cache: config_lib.CacheConfig,
    num_pages: int,
    page_len: int,
    mesh: jax.sharding.Mesh | None,
    page_hash: prefix_nodes.PageHash | None,
) -> prefix_store.PrefixStore:
    """Allocates pages and makes an empty tree; the cache's dtype is resolved."""
    config_lib.check_count("num_pages", num_pages, 1)
    config_lib.check_count("page_len", page_len, 1)
    check_copies(model.config, cache, model.dtype)
    codec = allocate.make_codec(cache, model.dtype)
    device = device_pages.DevicePages(model.config, codec, num_pages=num_pages, page_len=page_len, mesh=mesh)
    return prefix_store.PrefixStore(device, windows=prefix_store.windows_of(model.config), page_hash=page_hash)


def resolve(cache: config_lib.CacheConfig, compute_dtype: str) -> config_lib.CacheConfig:
    """Returns a config with its dtype by name and without slack, which changes no keys and values."""
    dtype = compute_dtype if cache.dtype == "auto" else cache.dtype
    return dataclasses.replace(cache, dtype=dtype, slack=0)


def check_dtype(asked: str, held: str) -> None:
    """Refuses a request whose keys and values are stored otherwise than those that are held."""
    config_lib.check(
        asked == held,
        f"cache dtype: expected {held}, that of the prefix cache, got {asked}; take that dtype for the request, or "
        "another prefix cache",
    )


def check_copies(config: config_lib.ModelConfig, cache: config_lib.CacheConfig, compute_dtype: str) -> None:
    """Refuses caches of which it is not known that the slots of a prompt can be copied, one by one and after it.

    What is not known here is refused, so that no option is ever read and not honoured.

    Raises:
      ValueError: an option beside layout, dtype and slack is set; some layer's layout is neither full nor a ring; or
        tokens are not stored each for itself.
    """
    config_lib.check(
        cache.eviction is None,
        f"cache eviction: expected none beside a prefix cache, got {cache.eviction}; leave one of them out",
    )
    for field in dataclasses.fields(cache):
        got = getattr(cache, field.name)
        config_lib.check(
            field.name in ("layout", "dtype", "slack") or got == field.default,
            f"cache {field.name}: expected {field.default} beside a prefix cache, got {got}; leave one of them out",
        )
    # With so few slots that no layer has a ring, and with so many that each that may has one.
    layouts = {type(allocate.layer_layout(layer, cache, slots)) for layer in config.layers for slots in (1, 2**30)}
    is_known = layouts <= {layout_full.FullLayout, layout_ring.RingLayout}
    config_lib.check(
        is_known,
        f"cache layout: expected auto or full beside a prefix cache, got {cache.layout!r}; leave one of them out",
    )
    codec = allocate.make_codec(cache, compute_dtype)
    is_known = {type(codec.keys), type(codec.values)} <= {codec_plain.PlainCodec, codec_token.TokenCodec}
    config_lib.check(
        is_known,
        f"cache dtype: expected one that stores each token for itself beside a prefix cache, got {cache.dtype!r}; "
        "use int8, fp8 or a float dtype",
    )


def _salt_digest(salt: str | None) -> str | None:
    if salt is None:
        return None
    got = "an empty text" if salt == "" else type(salt).__name__  # never the salt itself
    config_lib.check(isinstance(salt, str) and salt != "", f"salt: expected some text or None, got {got}")
    # Half of a surrogate pair is no character, and may be in a salt all the same.
    return hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=32, person=b"jdecode-salt").hexdigest()
