# SPDX-License-Identifier: Apache-2.0
"""Adds to a wheel what is made: man pages and completion for shells."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class MadeFiles(BuildHookInterface[Any]):
    """Called by hatchling. An editable installation gets none: its commands still change."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files and say where they go below the prefix of an installation."""
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        from distribution import completion, man_pages

        self._scratch = tempfile.TemporaryDirectory()
        texts = {f"man/man1/{name}": text for name, text in man_pages.pages().items()}
        for name, text in {**texts, **completion.files()}.items():
            build_data["shared_data"][self._written(f"share/{name}", text)] = f"share/{name}"

    def _written(self, name: str, text: str) -> str:
        path = Path(self._scratch.name, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    def finalize(self, version: str, *_: object) -> None:
        """Remove them: they are in the wheel."""
        if version != "editable":
            self._scratch.cleanup()
