"""The object that a command line names: a dataset, a function that makes one, or a Prefetcher."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

from ._config import Config
from ._errors import describe_error
from ._prefetcher import Prefetcher


class Unusable(Exception):
    """What the command line asks for cannot be done; the text says why."""


@dataclass(frozen=True)
class Target:
    """What is to be looked at, as arguments of a Prefetcher."""

    name: str
    arguments: dict[str, Any]

    @property
    def config(self) -> Config:
        return Config(**self.arguments)


def load(name: str) -> Target:
    """Import MODULE:OBJECT.

    Raises
    ------
    Unusable
        It cannot be imported, or is nothing that a Prefetcher reads.
    """
    value = _attribute(name)
    if isinstance(value, Prefetcher):
        return Target(name, value._config.arguments())
    target = Target(name, {"source": value})
    try:
        target.config  # noqa: B018 - it checks itself
    except TypeError as error:
        raise Unusable(f"{name}: {error}, or a Prefetcher") from None
    return target


def _attribute(name: str) -> Any:
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise Unusable(
            f"{name!r} is not MODULE:OBJECT: write train:dataset for `dataset` in train.py"
        )
    value: Any = _import(module)
    for part in path.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise Unusable(f"{name}: {module} has no {path}{_others(value)}") from None
    return value


def _import(module: str) -> Any:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        hint = ""
        if module.endswith(".py"):
            hint = f"; write {module.removesuffix('.py').replace(os.sep, '.')}, a module's name"
        raise Unusable(f"cannot import {module}: {describe_error(error)}{hint}") from error


def _others(value: Any) -> str:
    names = [name for name in vars(value) if not name.startswith("_")][:8]
    return f"; there are {', '.join(names)}" if names else ""
