"""How long jax spends on tracing and compiling, apart from running."""

import time
from typing import Self

import jax

_COMPILE_EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class CompileClock:
    """Sums the seconds of tracing, lowering and compiling while it is open. A context manager.

    Tracing nests (a jitted function in a jitted function is counted in both), so the sum is kept at or under the
    time that has passed.

    Attributes:
      seconds: so far.
    """

    def __init__(self) -> None:
        self._counted = 0.0
        self._opened = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of compilation since the clock was opened."""
        return min(self._counted, time.perf_counter() - self._opened)

    def __enter__(self) -> Self:
        self._opened = time.perf_counter()
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event in _COMPILE_EVENTS:
            self._counted += duration_secs
