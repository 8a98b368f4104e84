"""Groups of tokens as plain numpy stores them: keys by channel, values by token (KIVI, Liu et al. 2024, section 3)."""

import numpy as np


def keys(group_ZKH: np.ndarray, dtype: str) -> np.ndarray:
    """Quantises a group of keys by channel, with loops; returns what is read of it."""
    out = np.zeros_like(group_ZKH)
    for head in range(group_ZKH.shape[1]):
        for channel in range(group_ZKH.shape[2]):
            x = group_ZKH[:, head, channel]
            if dtype == "int4":
                step, base = (x.max() - x.min()) / 15, x.min()
            else:
                step, base = np.abs(x).max() / 127, 0.0
            out[:, head, channel] = base + step * np.round((x - base) / step) if step else base
    return out


def values(group_ZKH: np.ndarray, dtype: str) -> np.ndarray:
    """Quantises values by token and head, of up to 32 channels; in 4 bits step and middle are numbers of float16."""
    if dtype == "int4":
        least = group_ZKH.min(axis=-1, keepdims=True)
        step = ((group_ZKH.max(axis=-1, keepdims=True) - least) / 15).astype(np.float16).astype(np.float32)
        middle = (least + 8 * step).astype(np.float16).astype(np.float32)
        return middle + step * np.clip(np.round((group_ZKH - middle) / step), -8, 7)
    step = np.abs(group_ZKH).max(axis=-1, keepdims=True) / 127
    return step * np.round(group_ZKH / step)
