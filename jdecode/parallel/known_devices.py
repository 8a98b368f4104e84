"""Memory by name: what the devices that people run on have, and sizes such as ``16GiB``.

A GB of a data sheet is taken as 10^9 bytes, which is at most what the device has; some drivers show more. The runtime
keeps some of it for itself.
"""

import dataclasses
import re

from jdecode import config_file

GIB, GB = 2**30, 10**9
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40, "MB": 10**6, "GB": GB, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one device.

    Attributes:
      name: of the device, or the size as it was given.
      num_bytes: its bytes.
      platform: ``"tpu"``, ``"gpu"`` or ``"cpu"``; ``None`` where only a size is known.
    """

    name: str
    num_bytes: int
    platform: str | None = None


DEVICES: tuple[Memory, ...] = (
    # Google's documentation of Cloud TPU, HBM a chip.
    Memory(name="v4", num_bytes=32 * GIB, platform="tpu"),
    Memory(name="v5e", num_bytes=16 * GIB, platform="tpu"),
    Memory(name="v5p", num_bytes=95 * GIB, platform="tpu"),
    Memory(name="v6e", num_bytes=32 * GIB, platform="tpu"),
    Memory(name="tpu7x", num_bytes=192 * GIB, platform="tpu"),
    # NVIDIA's data sheets, memory a GPU.
    Memory(name="t4", num_bytes=16 * GB, platform="gpu"),
    Memory(name="v100-16gb", num_bytes=16 * GB, platform="gpu"),
    Memory(name="v100-32gb", num_bytes=32 * GB, platform="gpu"),
    Memory(name="a10", num_bytes=24 * GB, platform="gpu"),
    Memory(name="l4", num_bytes=24 * GB, platform="gpu"),
    Memory(name="l40s", num_bytes=48 * GB, platform="gpu"),
    Memory(name="rtx-4090", num_bytes=24 * GB, platform="gpu"),
    Memory(name="a100-40gb", num_bytes=40 * GB, platform="gpu"),
    Memory(name="a100-80gb", num_bytes=80 * GB, platform="gpu"),
    Memory(name="h100-80gb", num_bytes=80 * GB, platform="gpu"),
    Memory(name="h200-141gb", num_bytes=141 * GB, platform="gpu"),
    Memory(name="b200-180gb", num_bytes=180 * GB, platform="gpu"),
    # What Colab shows for the memory of its free runtime without an accelerator.
    Memory(name="colab-cpu", num_bytes=127 * GB // 10, platform="cpu"),
)


def memory(text: str) -> Memory:
    """Reads the name of a device, or a size with its unit (``16GiB``, ``12.5 GB``).

    Raises:
      ValueError: it is neither, or no byte at all.
    """
    for device in DEVICES:
        if text.strip().lower() == device.name:
            return device
    match = _SIZE.fullmatch(text.strip())
    unit = match and next((unit for unit in UNITS if unit.lower() == match[2].lower()), None)
    if not match or not unit:
        names = [device.name for device in DEVICES]
        near = config_file.nearest(text.strip().lower(), names)
        hint = near if near.startswith("known") else f"{near} known: {', '.join(names)}"
        raise ValueError(f"expected a size such as 16GiB or the name of a device, got {text!r}; {hint}")
    num_bytes = round(float(match[1]) * UNITS[unit])
    if num_bytes < 1:
        raise ValueError(f"expected a size over 0, got {text!r}")
    return Memory(name=text.strip(), num_bytes=num_bytes)


def size_text(num_bytes: float) -> str:
    """Writes a number of bytes in its largest binary unit: ``8 GiB`` where that is exact, ``7.94 GiB`` elsewhere."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes >= UNITS[unit]:
            value = num_bytes / UNITS[unit]
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.2f} {unit}"
    return f"{num_bytes:g} B"
