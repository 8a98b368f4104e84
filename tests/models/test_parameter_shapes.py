"""The table of parameters, path by path."""

import dataclasses

from jdecode import config
from jdecode.models import parameter_shapes

# By hand from the table of parameters: V=29, D=24, F=40, N=6, K=2, H=10.
EVERYTHING = {
    "embedding/weight": (29, 24),
    "layers_0/attention_norm/scale": (24,),
    "layers_0/attention/query/weight": (6, 10, 24),
    "layers_0/attention/query/bias": (6, 10),
    "layers_0/attention/key/weight": (2, 10, 24),
    "layers_0/attention/key/bias": (2, 10),
    "layers_0/attention/value/weight": (2, 10, 24),
    "layers_0/attention/value/bias": (2, 10),
    "layers_0/attention/query_norm/scale": (10,),
    "layers_0/attention/key_norm/scale": (10,),
    "layers_0/attention/output/weight": (24, 6, 10),
    "layers_0/attention/output/bias": (24,),
    "layers_0/post_attention_norm/scale": (24,),
    "layers_0/feed_forward_norm/scale": (24,),
    "layers_0/feed_forward/gate/weight": (40, 24),
    "layers_0/feed_forward/gate/bias": (40,),
    "layers_0/feed_forward/up/weight": (40, 24),
    "layers_0/feed_forward/up/bias": (40,),
    "layers_0/feed_forward/down/weight": (24, 40),
    "layers_0/feed_forward/down/bias": (24,),
    "layers_0/post_feed_forward_norm/scale": (24,),
    "final_norm/scale": (24,),
    "head/weight": (29, 24),
}
FILE_SHAPES = {
    "layers_0/attention/query/weight": (60, 24),
    "layers_0/attention/query/bias": (60,),
    "layers_0/attention/key/weight": (20, 24),
    "layers_0/attention/key/bias": (20,),
    "layers_0/attention/value/weight": (20, 24),
    "layers_0/attention/value/bias": (20,),
    "layers_0/attention/output/weight": (24, 60),
}


def test_parameter_shapes():
    model = config.ModelConfig(
        vocab_size=29,
        hidden_size=24,
        intermediate_size=40,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        layers=(config.LayerConfig(),),
        qkv_bias=True,
        output_bias=True,
        feed_forward_bias=True,
        qk_norm=True,
        post_norms=True,
    )
    shapes = parameter_shapes.parameter_shapes(model)
    assert shapes == EVERYTHING
    assert {
        path: parameter_shapes.file_shape(path, shape) for path, shape in shapes.items()
    } == EVERYTHING | FILE_SHAPES
    plain = dataclasses.replace(
        model, qkv_bias=False, output_bias=False, feed_forward_bias=False, qk_norm=False, post_norms=False
    )
    left = [
        path for path in EVERYTHING if not any(part in path for part in ("bias", "query_norm", "key_norm", "post_"))
    ]
    assert list(parameter_shapes.parameter_shapes(plain)) == left
    assert "head/weight" not in parameter_shapes.parameter_shapes(dataclasses.replace(model, tie_embeddings=True))
