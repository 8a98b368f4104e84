"""The attention layer: projections, query/key norms and rope around a call of an attention backend."""

import functools

import jax
from flax import linen as nn

from jdecode import config as config_lib
from jdecode.attention import select
from jdecode.cache import layer_view
from jdecode.models import linear, norms, rotary, sinks

LayerView = layer_view.CachedLayer | layer_view.UncachedLayer


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention, as K tells (Ainslie et al. 2023)."""

    config: config_lib.ModelConfig
    layer: config_lib.LayerConfig
    backend: str
    dtype: str

    @nn.compact
    def __call__(self, x_BTD: jax.Array, position_BT: jax.Array, view: LayerView):
        """Returns the output (B, T, D) and the layer's rows after the block (``None`` without a cache)."""
        config, layer = self.config, self.layer
        D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        projection = functools.partial(linear.Linear, has_bias=config.qkv_bias, dtype=self.dtype)
        q_BTNH = projection((N, H), (D,), ("heads", "head_dim", "embed"), name="query")(x_BTD)
        k_BTKH = projection((K, H), (D,), ("kv_heads", "head_dim", "embed"), name="key")(x_BTD)
        v_BTKH = projection((K, H), (D,), ("kv_heads", "head_dim", "embed"), name="value")(x_BTD)
        if config.qk_norm:
            norm = functools.partial(norms.RMSNorm, config.norm_eps, config.norm_offset, "head_dim")
            q_BTNH, k_BTKH = norm(name="query_norm")(q_BTNH), norm(name="key_norm")(k_BTKH)
        if layer.rope is not None:
            q_BTNH = rotary.rotate(q_BTNH, position_BT, layer.rope)
            k_BTKH = rotary.rotate(k_BTKH, position_BT, layer.rope)
        store, segments = view.append(k_BTKH, v_BTKH)
        choices = {
            "scale": config.attention_scale,
            "window": layer.window,
            "num_sinks": layer.num_sinks,
            "soft_cap": config.attention_soft_cap,
        }
        seen = sinks.inside_cache(segments, position_BT, layer)
        out_BTNH = select.backend(self.backend)(q_BTNH, position_BT, seen, **choices)
        output = linear.Linear(
            (D,), (N, H), ("embed", "heads", "head_dim"), config.output_bias, self.dtype, name="output"
        )
        return output(out_BTNH), view.observe(store, q_BTNH, segments, **choices)
