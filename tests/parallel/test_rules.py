"""Which axis is split along which mesh axis, and meshes."""

import jax
import pytest

from jdecode import config as config_lib
from jdecode.parallel import mesh as mesh_lib
from jdecode.parallel import rules

P = jax.sharding.PartitionSpec


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return mesh_lib.make_mesh(config_lib.MeshConfig(data=2, model=4))


def test_axes_by_name(mesh):
    assert rules.partition_spec(mesh, ("batch", None, "kv_heads"), (6, 9, 8)) == P("data", None, "model")
    assert rules.partition_spec(mesh, ("vocab", "embed"), (12, 8)) == P("model", None)
    assert rules.partition_spec(mesh, ("heads", "head_dim", "embed"), (4, 8, 8)) == P("model", None, None)
    assert rules.partition_spec(mesh, ("embed", "mlp"), (8, 20)) == P(None, "model")
    assert rules.partition_spec(mesh, (), ()) == P()


# More devices than key/value heads, or a count that does not divide, cut heads into fractions
# (huggingface/transformers#48307, aws-neuron/aws-neuron-sdk#1289).
@pytest.mark.parametrize(("heads", "is_split"), [(1, False), (2, False), (3, False), (4, True), (6, False), (8, True)])
def test_axis_that_does_not_divide_stays_whole(mesh, heads, is_split):
    spec = rules.partition_spec(mesh, ("batch", None, "kv_heads"), (3, 9, heads))
    assert spec == P(None, None, "model" if is_split else None)


def test_mesh_axis_is_used_once(mesh):
    assert rules.partition_spec(mesh, ("vocab", "heads"), (8, 8)) == P("model", None)


def test_sharding_splits(mesh):
    sharding = rules.sharding(mesh, ("batch", None, "kv_heads"), (6, 9, 8))
    assert sharding.shard_shape((6, 9, 8)) == (3, 9, 2)


def test_unknown_name_is_refused(mesh):
    with pytest.raises(ValueError, match=r"logical axis: expected one of batch, vocab, .*, got 'widht'"):
        rules.partition_spec(mesh, ("batch", "widht"), (6, 9))


def test_names_and_lengths_must_match(mesh):
    with pytest.raises(ValueError, match="longer"):
        rules.partition_spec(mesh, ("batch", None), (6, 9, 8))


def test_mesh_has_the_first_devices_in_order():
    small = mesh_lib.make_mesh(config_lib.MeshConfig(data=2, model=3))
    assert small.axis_names == ("data", "model")
    assert [[device.id for device in row] for row in small.devices] == [[0, 1, 2], [3, 4, 5]]


def test_too_many_devices_are_refused():
    with pytest.raises(ValueError, match=r"expected at most 8 devices .* got data=3 x model=3 = 9"):
        mesh_lib.make_mesh(config_lib.MeshConfig(data=3, model=3))
