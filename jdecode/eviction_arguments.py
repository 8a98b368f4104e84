"""The flags that say what a cache keeps of a text."""

import argparse
import dataclasses

from jdecode import command_line, config


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the flags that say what a cache keeps."""
    group.add_argument(
        "--cache-budget",
        metavar="M",
        type=command_line.whole_number(2),
        help="tokens that a layer without a window keeps",
    )
    group.add_argument(
        "--eviction",
        choices=config.EVICTIONS,
        help="snapkv: keep M tokens of the prompt; h2o: keep M in all, however long the text",
    )


def settings(arguments: argparse.Namespace, base: config.CacheConfig) -> config.CacheConfig:
    """Lays the flags of ``add_arguments`` over a config.

    Raises:
      ValueError: one of them stands alone, or does not go with the rest of the config.
    """
    eviction, budget = arguments.eviction or base.eviction, arguments.cache_budget or base.budget
    for flag, given, other, missing in (
        ("--cache-budget", arguments.cache_budget, "--eviction", eviction),
        ("--eviction", arguments.eviction, "--cache-budget", budget),
    ):
        if given is not None and missing is None:
            raise ValueError(f"{flag}: expected {other} beside it, got none; add it, or leave both out")
    return dataclasses.replace(base, eviction=eviction, budget=budget)
