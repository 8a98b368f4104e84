"""The decoder-only transformer: tokens and a cache in, logits and the cache after them out.

Families differ by data (``ModelConfig``), not by subclass. Parameters are a plain pytree::

    embedding/weight (V, D)
    layers_{i}/attention_norm/scale (D,)              layers_{i}/feed_forward_norm/scale (D,)
              /attention/query/weight (N, H, D)                 /feed_forward/gate/weight (F, D)
                        /key/weight, value/weight (K, H, D)                  /up/weight (F, D)
                        /query_norm/scale, key_norm/scale (H,)               /down/weight (D, F)
                        /output/weight (D, N, H)
              /post_attention_norm/scale (D,)                   /post_feed_forward_norm/scale (D,)
    final_norm/scale (D,)
    head/weight (V, D)                                absent where the embedding is tied
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from jdecode import config as config_lib
from jdecode.attention import visibility
from jdecode.cache import block as block_lib
from jdecode.cache import kv_cache, layer_view
from jdecode.models import attention, feed_forward, linear, norms, panels


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    config: config_lib.ModelConfig
    layer: config_lib.LayerConfig
    backend: str
    dtype: str

    @nn.compact
    def __call__(self, x_BTD: jax.Array, position_BT: jax.Array, view: attention.LayerView):
        """Returns the stream after the block and the layer's rows (``None`` without a cache)."""
        config = self.config
        norm = functools.partial(norms.RMSNorm, config.norm_eps, config.norm_offset)
        layer = attention.Attention(config, self.layer, self.backend, self.dtype, name="attention")
        y_BTD, store = layer(norm(name="attention_norm")(x_BTD), position_BT, view)
        if config.post_norms:
            y_BTD = norm(name="post_attention_norm")(y_BTD)
        x_BTD = x_BTD + y_BTD
        y_BTD = feed_forward.FeedForward(config, self.dtype, name="feed_forward")(norm(name="feed_forward_norm")(x_BTD))
        if config.post_norms:
            y_BTD = norm(name="post_feed_forward_norm")(y_BTD)
        return x_BTD + y_BTD, store


class Embedding(nn.Module):
    """The (V, D) matrix that embeds tokens and, where tied, is also the output head."""

    config: config_lib.ModelConfig
    dtype: str

    def setup(self) -> None:
        self.weight = _vocabulary_matrix(self, self.config)

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """Looks tokens up: (B, T) int32 to (B, T, D)."""
        if isinstance(self.weight, panels.Panels):
            x_BTD = self.weight.take(tokens_BT).astype(self.dtype)
        else:
            x_BTD = jnp.take(self.weight, tokens_BT, axis=0, mode="clip").astype(self.dtype)
        # The scale is rounded to the compute dtype first, as the published Gemma does.
        return x_BTD * jnp.asarray(self.config.embedding_scale, self.dtype)

    def attend(self, x_BTD: jax.Array) -> jax.Array:
        """Scores every token: (B, T, D) to float32 (B, T, V)."""
        return _scores(x_BTD, self.weight, self.dtype)


class Head(nn.Module):
    """The (V, D) output matrix of a model whose embedding is not tied."""

    config: config_lib.ModelConfig
    dtype: str

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Scores every token: (B, T, D) to float32 (B, T, V)."""
        weight_VD = _vocabulary_matrix(self, self.config)
        return _scores(x_BTD, weight_VD, self.dtype)


def _vocabulary_matrix(module: nn.Module, config: config_lib.ModelConfig) -> jax.Array | panels.Panels:
    shape, init = (config.vocab_size, config.hidden_size), nn.initializers.normal(linear.INITIALIZER_RANGE)
    return linear.weight(module, init, shape, ("vocab", "embed"))


def _scores(x_BTD: jax.Array, weight_VD: jax.Array | panels.Panels, dtype: str) -> jax.Array:
    return linear.product(x_BTD, weight_VD, 1, dtype, out_dtype="float32")


class Transformer(nn.Module):
    """A causal language model.

    Attributes:
      config: shapes and choices. Static.
      backend: attention backend by name, see ``attention.select``. Static.
      dtype: of activations and products. Parameters may be stored in another. Static.

    Example::

        logits_BTV, cache = model.apply({"params": params}, tokens_BT, cache)
    """

    config: config_lib.ModelConfig
    backend: str = "auto"
    dtype: str = "float32"

    @nn.compact
    def __call__(
        self,
        tokens_BT: jax.Array,
        cache: kv_cache.KVCache | None = None,
        *,
        num_tokens_B: jax.Array | None = None,
        last_only: bool = False,
    ) -> tuple[jax.Array, kv_cache.KVCache | None]:
        """Runs a block of tokens through the model.

        Args:
          tokens_BT: int32, ids in ``0 .. V-1``. Row b continues at position ``cache.length_B[b]``.
          cache: what each row has seen so far. ``None``: rows start at position 0 and nothing is kept.
          num_tokens_B: int32, how many tokens of each row are real; the rest, at the row's end, is padding that
            is neither seen nor stored. ``None``: all.
          last_only: score only the last real token of each row. Static.

        Returns:
          Logits, float32: (B, T, V), or (B, 1, V) with ``last_only``; those of padding mean nothing. And the cache
          after the block (``None`` without one). Tokens past the cache's ``max_len`` are dropped, so check before.
        """
        config = self.config
        B, T = tokens_BT.shape
        if cache is not None and cache.batch_size != B:
            raise ValueError(f"tokens_BT: expected {cache.batch_size} rows, as the cache has, got {B}")
        embedding = Embedding(config, self.dtype, name="embedding")
        if cache is None:
            block = block_lib.open_block_without_cache(B, T, num_tokens_B)
        else:
            block = block_lib.open_block(cache, T, num_tokens_B)
        x_BTD = embedding.embed(tokens_BT)
        stores = []
        for idx, layer in enumerate(config.layers):
            view = _layer_view(cache, block, idx, layer)
            module = TransformerBlock(config, layer, self.backend, self.dtype, name=f"layers_{idx}")
            x_BTD, store = module(x_BTD, block.position_BT, view)
            stores.append(store)
        if last_only:
            last_B = jnp.full(B, T - 1) if num_tokens_B is None else jnp.maximum(num_tokens_B - 1, 0)
            x_BTD = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)
        x_BTD = norms.RMSNorm(config.norm_eps, config.norm_offset, name="final_norm")(x_BTD)
        logits_BTV = embedding.attend(x_BTD) if config.tie_embeddings else Head(config, self.dtype, name="head")(x_BTD)
        logits_BTV = visibility.soft_capped(logits_BTV, config.final_soft_cap)
        return logits_BTV, None if cache is None else block_lib.close_block(cache, block, stores)


def _layer_view(
    cache: kv_cache.KVCache | None, block: block_lib.Block, idx: int, layer: config_lib.LayerConfig
) -> attention.LayerView:
    if cache is None:
        return layer_view.UncachedLayer(block=block)
    return layer_view.CachedLayer(
        cache=cache, block=block, layer_idx=idx, window=layer.window, num_sinks=layer.num_sinks
    )
