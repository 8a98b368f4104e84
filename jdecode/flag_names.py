"""What an argument of the library is called at the shell. The library's refusals begin with the argument's name."""

import contextlib
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def named(flags: Mapping[str, str]) -> Iterator[None]:
    """Has a refusal from within begin with the flag, where it begins with the name of an argument and a colon.

    Args:
      flags: of the arguments that have one.
    """
    try:
        yield
    except ValueError as error:
        name, _, rest = str(error).partition(":")
        if name not in flags:
            raise
        raise ValueError(f"{flags[name]}:{rest}") from None
