"""The bytes of a pool of pages: the one owner of arrays that every copy into them donates.

A call that fails after it was given the arrays leaves none behind (``is_sound`` says so), and what the host knew of
their contents is then worth nothing: ``clear`` them and forget it.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jdecode import config as config_lib
from jdecode import shapes
from jdecode.cache import codec as codec_lib
from jdecode.cache import kv_cache
from jdecode.parallel import device_memory
from jdecode.serving import page_copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens of one row that are to be copied into the pages of its table.

    Attributes:
      start: position of the first.
      num_tokens: 0 for a row of which nothing is kept.
      pages: of the row's table, from position 0 on.
    """

    start: int = 0
    num_tokens: int = 0
    pages: tuple[int, ...] = ()


class DevicePages:
    """P pages of Z tokens, for every layer of a model.

    Args:
      config: of the model.
      codec: how keys and values are stored.
      num_pages, page_len: P and Z.
      mesh: heads are spread along ``model``, pages lie whole on every device; ``None`` for the default device.

    Raises:
      ValueError: they are larger than the memory of the devices.
    """

    def __init__(
        self,
        config: config_lib.ModelConfig,
        codec: codec_lib.KVCodec,
        *,
        num_pages: int,
        page_len: int,
        mesh: jax.sharding.Mesh | None,
    ) -> None:
        self.num_pages, self.page_len, self.mesh = num_pages, page_len, mesh
        self._init = functools.partial(page_copies.init, config, codec, num_pages=num_pages, page_len=page_len)
        what = f"a prefix cache of {num_pages} pages x {page_len} slots"
        device_memory.check(jax.eval_shape(self._init), mesh, what, remedy="take fewer, or a narrower cache dtype")
        self.stores: page_copies.Pages = self._init(mesh=mesh)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.stores))

    def is_sound(self) -> bool:
        """Says whether the arrays are there and were computed; waits for them."""
        leaves = jax.tree.leaves(self.stores)
        if any(leaf.is_deleted() for leaf in leaves):
            return False
        try:
            jax.block_until_ready(leaves)
        except Exception:  # whatever a device says of an array that it could not compute
            return False
        return True

    def clear(self) -> None:
        """Makes new pages, which hold nothing."""
        self.stores = self._init(mesh=self.mesh)

    def put_leaves(self, leaves: Sequence[jax.Array]) -> None:
        """Takes other arrays in the place of its own, of the same shapes and dtypes, in the order of the pytree."""
        self.stores = jax.tree.structure(self.stores).unflatten(leaves)

    def restore(
        self, cache: kv_cache.KVCache, pages: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> kv_cache.KVCache:
        """Brings the first tokens of each row's text into an empty cache, which is donated.

        Args:
          pages: of each row, from position 0 on.
          lengths: tokens that each row gets.
        """
        width = shapes.power_of_two_at_least(max(map(len, pages)))
        page_BC = np.full((len(pages), width), self.num_pages, np.int32)
        for row, own in enumerate(pages):
            page_BC[row, : len(own)] = own
        return page_copies.restore(cache, self.stores, jnp.asarray(page_BC), jnp.asarray(lengths, jnp.int32))

    def copy(self, pairs: Sequence[tuple[int, int]], width: int) -> None:
        """Copies pages (from, to), pair by pair.

        Args:
          width: at least as many as there are pairs; decides what is compiled.
        """
        if not pairs:
            return
        padding = [(0, self.num_pages)] * (width - len(pairs))
        from_N, to_N = np.asarray([*pairs, *padding], np.int32).T
        self.stores = page_copies.copy_pages(self.stores, jnp.asarray(from_N), jnp.asarray(to_N))

    def keep(self, cache: kv_cache.KVCache, spans: Sequence[Span], width: int) -> None:
        """Copies tokens of a cache into pages.

        Args:
          spans: one a row; their pages are distinct.
          width: at least the tokens of each span; decides what is compiled.
        """
        idx_T = np.arange(width, dtype=np.int32)
        position_BT = np.stack([span.start + idx_T for span in spans])
        page_BT = np.full_like(position_BT, self.num_pages)
        for row, span in enumerate(spans):
            columns = position_BT[row, : span.num_tokens] // self.page_len
            page_BT[row, : span.num_tokens] = np.asarray(span.pages, np.int32)[columns]
        arrays = map(jnp.asarray, (position_BT, page_BT, position_BT % self.page_len))
        self.stores = page_copies.keep(self.stores, cache, *arrays)
