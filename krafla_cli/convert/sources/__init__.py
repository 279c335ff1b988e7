"""Where weights come from: one class per kind of checkpoint, all with the interface of :class:`Source`."""

from krafla_cli.convert.sources.base import Source
from krafla_cli.convert.sources.folder import open_folder
from krafla_cli.convert.sources.typed import TypedSource

__all__ = ["Source", "TypedSource", "open_folder"]
