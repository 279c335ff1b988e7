"""Checkpoints to .mlb models. The package can be called: ``krafla_cli.convert(src, out)`` is ``pipeline.convert``.

Python binds a package's name in its parent as soon as one of its modules is imported, which would hide a function of
that name; so the package itself stands for it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from krafla_cli.convert.pipeline import convert

        return convert(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
