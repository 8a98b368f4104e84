"""What a cache of each dtype holds of keys and values, by the formulas in the codecs' docstrings, in numpy.

Nothing here is the package's own but the names of dtypes. A number of float32 that falls between two steps may be
rounded to either, so what is read is held against the nearest step, and against the number itself.
"""

import ml_dtypes
import numpy as np
from scipy import linalg

FLOATS = ("float32", "bfloat16", "float16")
BY_TOKEN = ("int8", "fp8")
BY_GROUP = ("int8_channel", "int4")


def held(x_ZKH: np.ndarray, dtype: str, side: str) -> np.ndarray:
    """Says what is held of a block.

    Args:
      x_ZKH: numbers; for ``BY_GROUP`` the tokens of a group, else any number of tokens. Floats of 16 bits must hold
        them exactly.
      dtype: of the cache.
      side: ``"keys"`` or ``"values"``.

    Returns:
      float64 (4, Z, K, H): the number, as it is stored (rotated where keys are); the nearest one that can be; how far
      from there to the next; and how far other roundings of scales and sums may move it.
    """
    x = rotated(np.asarray(x_ZKH, np.float64), dtype, side)
    if dtype in FLOATS:
        return np.stack([x, x, np.zeros_like(x), np.zeros_like(x)])
    if dtype == "fp8":
        nearest, step = _fp8(x)
    elif dtype == "int4" and side == "values":
        return _int4_runs(x)
    elif dtype in BY_GROUP and side == "keys":
        nearest, step = _channels(x, dtype)
    else:
        step = np.broadcast_to(np.abs(x).max(axis=-1, keepdims=True) / 127, x.shape)
        nearest = step * np.round(x / step)
    # A rotation sums over the head, in float32.
    return np.stack([x, nearest, step, 1e-3 * step + 1e-6 * np.abs(x).max(axis=-1, keepdims=True)])


def assert_held(got_XKH: np.ndarray, held_4XKH: np.ndarray, dtype: str, side: str) -> None:
    """Holds what is read, as it was before it was stored, against what should be held."""
    got = rotated(np.asarray(got_XKH, np.float64), dtype, side)
    number, nearest, step, slip = held_4XKH
    is_between = np.abs(np.abs(number - nearest) - step / 2) <= 0.005 * step + slip
    assert (np.abs(got - nearest) <= np.where(is_between, step, 0) + slip).all()
    assert (np.abs(got - number) <= 0.505 * step + slip).all()


def rotated(x_ZKH: np.ndarray, dtype: str, side: str) -> np.ndarray:
    """Multiplies each head of the keys of ``BY_TOKEN``, in runs of a power of two, by Sylvester's matrix."""
    if dtype not in BY_TOKEN or side != "keys":
        return x_ZKH
    run_len = x_ZKH.shape[-1] & -x_ZKH.shape[-1]
    matrix = linalg.hadamard(run_len) / np.sqrt(run_len)
    runs = x_ZKH.reshape(*x_ZKH.shape[:-1], x_ZKH.shape[-1] // run_len, run_len)
    return (runs @ matrix).reshape(x_ZKH.shape)


def _fp8(x_ZKH: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Four bits of exponent, the least of which is -6, and three of mantissa."""
    scale = np.abs(x_ZKH).max(axis=-1, keepdims=True) / 448
    nearest = scale * (x_ZKH / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    exponent = np.floor(np.log2(np.maximum(np.abs(x_ZKH / scale), 2.0**-6)))
    return nearest, scale * 2.0 ** (exponent - 3)


def _channels(x_ZKH: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """A step a head and channel, over the tokens of the group."""
    least, most = x_ZKH.min(axis=0), x_ZKH.max(axis=0)
    if dtype == "int4":
        step, offset = (most - least) / 15, least
    else:
        step, offset = np.maximum(np.abs(least), np.abs(most)) / 127, np.zeros_like(least)
    return offset + step * np.round((x_ZKH - offset) / step), np.broadcast_to(step, x_ZKH.shape)


def _int4_runs(x_ZKH: np.ndarray) -> np.ndarray:
    """A step and an offset a token and run of channels, both numbers of float16."""
    run_len = max(length for length in range(1, 33) if x_ZKH.shape[-1] % length == 0)
    x = x_ZKH.reshape(*x_ZKH.shape[:-1], x_ZKH.shape[-1] // run_len, run_len)
    least, most = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    step = ((most - least) / 15).astype(np.float16).astype(np.float64)
    offset = (least + 8 * step).astype(np.float16).astype(np.float64)
    nearest = offset + step * np.clip(np.round((x - offset) / step), -8, 7)
    slip = 2.0**-10 * (8 * step + np.abs(offset))  # a unit in the last place of both
    columns = (np.broadcast_to(column, x.shape).reshape(x_ZKH.shape) for column in (x, nearest, step, slip))
    return np.stack(list(columns))
